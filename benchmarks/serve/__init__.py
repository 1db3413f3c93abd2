"""The service under load, under requests that are none, and killed in the middle: `python -m benchmarks.serve`."""
