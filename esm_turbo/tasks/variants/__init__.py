"""Scoring the effects of substitutions in a protein."""
