"""Experiments on accuracy."""
