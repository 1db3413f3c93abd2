"""Shared by all benchmarks: timing, models, records of results."""
