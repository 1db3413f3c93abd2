"""Protein sequences: FASTA input, token ids, batches, and length limits."""
