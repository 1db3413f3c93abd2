"""Overhead of writing a cache in a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EsmModel

from benchmarks.harness.embedded import plain_model
from benchmarks.harness.measure import Case, Check, Figures, interleave, ratio, spread, worst
from benchmarks.harness.models import Architecture, random_calibration, random_model, random_tokens, with_presets
from esm_turbo import Calibration, TurboEsmModel
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import PRODUCT_PRESETS, Geometry

_TOLERANCE = 1e-5
_WHAT = "hidden states of the prefill against the plain forward, largest difference"


def embedded_cases(tokens: Sequence[int]) -> Iterator[Case]:
    """The embedded model."""
    model = plain_model().esm
    yield from _cases(EMBEDDED_MODEL.name, model, Calibration.load(EMBEDDED_MODEL), tokens)


def random_cases(architecture: Architecture, tokens: Sequence[int]) -> Iterator[Case]:
    """Random weights in the geometry of a larger model."""
    model = random_model(architecture)
    yield from _cases(architecture.name, model, random_calibration(model), tokens)


def _cases(name: str, model: EsmModel, calibration: Calibration, tokens: Sequence[int]) -> Iterator[Case]:
    turbo = with_presets(model, calibration)
    geometry = Geometry.of(model.config)
    for n in tokens:
        ids = random_tokens(1, n - 1)

        @torch.no_grad()
        def check(ids: Tensor = ids) -> Check:
            expected = model(ids).last_hidden_state
            errors = []
            for preset in PRODUCT_PRESETS:
                output = _prefill(turbo[preset], ids)
                stored = output.past_key_values.get_seq_length() == ids.shape[1]
                difference = float((output.last_hidden_state - expected).abs().max())
                errors.append(difference if stored else float("inf"))
            return Check(_WHAT, worst(errors), _TOLERANCE)

        @torch.no_grad()
        def measure(repeats: int, ids: Tensor = ids) -> Figures:
            arms = {"forward": [partial(model, ids)]}
            for preset in PRODUCT_PRESETS:
                arms[f"prefill {preset}"] = [partial(_prefill, turbo[preset], ids)]
            seconds = spread(interleave(arms, repeats))
            ratios = {f"prefill {p} / forward": ratio(seconds, f"prefill {p}", "forward") for p in PRODUCT_PRESETS}
            return {"seconds": seconds, "ratios": ratios}

        yield Case(
            name=f"{name}, {n} tokens",
            model=name,
            shape={
                "layers": geometry.num_layers,
                "heads": geometry.num_heads,
                "head_dim": geometry.head_dim,
                "batch_size": 1,
                "tokens": n,
                "dtype": "float32",
            },
            check=check,
            measure=measure,
        )


def _prefill(model: TurboEsmModel, ids: Tensor) -> Any:
    return model(ids, use_cache=True)
