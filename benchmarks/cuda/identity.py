"""Cost of the identity of a model on a CUDA device: opening a store, looking for changes, calls with and without it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import cuda_timing
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, largest_difference, ratio, spread
from benchmarks.harness.models import Architecture, masked_lm, random_calibration, random_sequences, turbo_of
from esm_turbo import ContextStore, TurboEsm
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.files.identity import exact_identity, model_identity
from esm_turbo.model import cache_engine

_CALLS = 20


def identity_cases(architecture: Architecture, residues: int, peptide: int, at_most: float) -> Iterator[Case]:
    """One model of random weights in bfloat16.

    Args:
        architecture: of the model.
        residues: of the context.
        peptide: new residues of a call, which is captured as a CUDA graph.
        at_most: time of a call relative to one without checks.
    """
    if cuda_timing.available():
        yield identity_case(architecture, residues, peptide, at_most, cuda_timing.DEVICE)


def identity_case(architecture: Architecture, residues: int, peptide: int, at_most: float, device: str) -> Case:
    """See `identity_cases`."""
    model = masked_lm(architecture, device)
    turbo = turbo_of(model, random_calibration(model.esm, [DEFAULT_PRESET]), DEFAULT_PRESET)
    turbo.model.to(torch.bfloat16)
    context, new = random_sequences([residues, peptide])

    def check() -> Check:
        cache = turbo.prefill(context)
        checked = turbo.extend(cache, new).logits
        with _unchecked(turbo):
            plain = turbo.extend(cache, new).logits
        return Check("logits with and without checks, largest difference", largest_difference(checked, plain), 0.0)

    def measure(repeats: int) -> Figures:
        cache, esm = turbo.prefill(context), turbo.model.esm

        def extend() -> None:
            for _ in range(_CALLS):
                turbo.extend(cache, new)
            _wait(device)

        def unchecked() -> None:
            with _unchecked(turbo):
                extend()

        with tempfile.TemporaryDirectory() as folder:
            ContextStore(folder).add(turbo, [new])
            arms: dict[str, list[Callable[[], Any]]] = {
                "opening a store": [lambda: ContextStore(Path(folder)).check_model(turbo)],
                "reading all of the model": [partial(exact_identity, esm)],
                "looking for changes": [partial(model_identity, esm, sampled=False)],
                "looking for changes in the sample, too": [turbo.model.refresh_fingerprint],
                "extension": [extend],
                "extension without checks": [unchecked],
            }
            seconds = spread(interleave(arms, repeats))
        for name in ("extension", "extension without checks"):
            seconds[name] = {key: value / _CALLS for key, value in seconds[name].items()}
        ratios = {"extension / without checks": ratio(seconds, "extension", "extension without checks")}
        return {"seconds": seconds, "ratios": ratios}

    shape = {
        **architecture.described(),
        "context_tokens": residues + 1,
        "new_residues": peptide,
        "preset": DEFAULT_PRESET,
        "dtype": "bfloat16",
        "device": device,
        "device_name": device_name(model.device),
    }
    target = Target(("ratios", "extension / without checks"), at_most=at_most)
    return Case("identity of a model", architecture.name, shape, check, measure, [target])


@contextlib.contextmanager
def _unchecked(turbo: TurboEsm) -> Iterator[None]:
    """Calls take the identity that was last seen."""
    identity = model_identity(turbo.model.esm, sampled=False)
    with mock.patch.object(cache_engine, "model_identity", lambda *_, **__: identity):
        yield


def _wait(device: str) -> None:
    if device == cuda_timing.DEVICE:
        torch.cuda.synchronize()
