"""Speed, memory and validation on a CUDA device."""
