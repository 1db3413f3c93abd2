"""Codecs of other methods, for comparison only."""
