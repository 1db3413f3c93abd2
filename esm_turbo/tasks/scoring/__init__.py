"""Scoring candidates, such as peptides, as continuations of a target."""
