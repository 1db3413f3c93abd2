"""Accuracy and memory of presets (docs/concepts.md)."""

from __future__ import annotations

from esm_turbo.evaluate.evaluation import Evaluation
from esm_turbo.evaluate.metrics import Accuracy
from esm_turbo.evaluate.results import PresetEvaluation, TokenAccuracy
from esm_turbo.evaluate.run import evaluate

__all__ = [
    "Accuracy",
    "Evaluation",
    "PresetEvaluation",
    "TokenAccuracy",
    "evaluate",
]
