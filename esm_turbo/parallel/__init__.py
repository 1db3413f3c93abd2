"""Runs on several devices, processes and machines: processes that share the pieces of a run, shards, Ray."""
