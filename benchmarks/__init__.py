"""Measurements of accuracy, speed and memory; run from the repository's root as `python -m benchmarks.NAME`."""
