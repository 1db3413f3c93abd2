"""Choices that the Python calls and the command line share; imports nothing, so that `--help` stays quick."""

from typing import Literal

Include = Literal["mean", "per_tok", "bos", "contacts", "cache"]
EmbeddingFormat = Literal["pt", "h5", "safetensors"]
