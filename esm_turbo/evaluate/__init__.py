"""Accuracy and memory of presets on proteins (docs/concepts.md)."""

from __future__ import annotations

from .ablation import PAPER_ABLATION, PAPER_TABLE_7
from .metrics import Accuracy
from .outliers import with_outliers
from .results import Evaluation, PresetEvaluation, TokenAccuracy
from .run import evaluate

__all__ = [
    "PAPER_ABLATION",
    "PAPER_TABLE_7",
    "Accuracy",
    "Evaluation",
    "PresetEvaluation",
    "TokenAccuracy",
    "evaluate",
    "with_outliers",
]
