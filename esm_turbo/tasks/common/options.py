"""Choices and defaults that the Python calls and the command line share. Imports nothing, so `--help` stays fast."""

from typing import Literal

Include = Literal["mean", "per_tok", "bos", "contacts", "cache"]
"""Results of an embedding, named as in `esm-extract`."""

EmbeddingFormat = Literal["pt", "h5", "safetensors", "parquet"]
"""File format of embeddings."""

ONE_FILE: dict[EmbeddingFormat, Literal["HDF5", "Parquet"]] = {"h5": "HDF5", "parquet": "Parquet"}
"""Formats of embeddings that are one file, and what that is; the others are folders."""

FileNames = Literal["hash", "label"]
"""Names of files of embeddings: a hash of the sequence, or its label where that is a safe name."""

UnmaskingOrder = Literal["random", "confidence", "left_to_right"]
"""Order in which masked positions are drawn."""

Arm = Literal["full", "frozen", "turbo"]
"""Computation of a score: everything again, or with a context cached at full precision, or compressed."""

CandidateFill = Literal["masked", "empty"]
"""Contents of the candidate's positions while a target is cached: masks, or nothing."""

Background = Literal["none", "alone", "targets", "decoys", "all-decoys"]
"""Contexts that candidates are compared with: no target, the other targets of a run, or the shipped decoys."""

UnknownResidues = Literal["omit", "score"]
"""Whether B, X and Z, which stand for several residues, are left out of a candidate's figures."""

SortBy = Literal["likelihood", "specificity"]
"""Figure that ranks candidates."""

MarginalMethod = Literal["masked", "wild_type"]
"""Input at the position of a variant: a mask, or the wild type's residue."""

VariantMethod = Literal["masked", "wild_type", "pseudo_perplexity"]
"""How variants are scored: by marginals at their positions, or by the pseudo-perplexity of the whole variant."""

METHOD_NAMES: dict[VariantMethod, str] = {
    "masked": "masked marginals",
    "wild_type": "wild-type marginals",
    "pseudo_perplexity": "pseudo-perplexity",
}

DEFAULT_TOP_K = 10
"""Number of top candidates used to compare rankings."""
