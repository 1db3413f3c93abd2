"""Parts of the patched model: sessions, calibration collectors, and captured CUDA graphs."""
