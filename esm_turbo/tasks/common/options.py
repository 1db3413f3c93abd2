"""Choices that the Python calls and the command line share; imports nothing, so that `--help` stays quick."""

from typing import Literal

Include = Literal["mean", "per_tok", "bos", "contacts", "cache"]
EmbeddingFormat = Literal["pt", "h5", "safetensors"]
UnmaskingOrder = Literal["random", "confidence", "left_to_right"]
Arm = Literal["full", "frozen", "turbo"]
Place = Literal["masked", "empty"]
MarginalMethod = Literal["masked", "wild_type"]
