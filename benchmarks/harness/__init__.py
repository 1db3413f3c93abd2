"""Shared by all benchmarks: checks, timing, models, names and records of results."""
