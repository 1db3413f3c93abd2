"""Parts of the model: inputs, checkpoints, projections, sessions, calibration collectors, CUDA graphs, packed rows."""
