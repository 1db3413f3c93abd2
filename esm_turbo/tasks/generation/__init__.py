"""Generating residues after a prefix, or in place of masks."""
