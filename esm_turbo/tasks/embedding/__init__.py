"""Embedding proteins, to arrays or to files, of any length."""
