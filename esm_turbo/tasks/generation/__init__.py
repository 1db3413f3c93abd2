"""Generating residues, to the right of a prefix or in place of masked ones."""
