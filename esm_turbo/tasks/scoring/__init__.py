"""Scoring candidates as continuations of a target."""
