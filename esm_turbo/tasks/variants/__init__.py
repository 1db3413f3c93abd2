"""Scoring substitutions in a wild type."""
