"""Cost of the identity of a model: opening a store, looking for changes, calls with and without it."""

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
from benchmarks.harness.models import Architecture, random_sequences, random_turbo
from esm_turbo import ContextStore, TurboEsm
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.files.identity import exact_identity, model_identity
from esm_turbo.model import cache_engine


def cases(
    architecture: Architecture,
    residues: int,
    peptide: int,
    device: str,
    dtype: torch.dtype,
    *,
    calls: int,
    at_most: float,
) -> Iterator[Case]:
    """One model of random weights; no case without its device.

    Args:
        architecture: of the model.
        residues: of the context.
        peptide: new residues of a call, which on a CUDA device is captured as a graph.
        device: of the model.
        dtype: of the model.
        calls: extensions that are timed together.
        at_most: time of a call relative to one without checks.
    """
    if device == "cuda" and not cuda_timing.available():
        return
    turbo = random_turbo(architecture, DEFAULT_PRESET, device, dtype)
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
            for _ in range(calls):
                turbo.extend(cache, new)
            _wait(device)

        def unchecked() -> None:
            with _unchecked(turbo):
                extend()

        def read() -> None:
            for _ in range(calls):
                turbo.extend(cache, new).logits.cpu()

        def read_unchecked() -> None:
            with _unchecked(turbo):
                read()

        with tempfile.TemporaryDirectory() as folder:
            ContextStore(folder).add(turbo, [new])
            arms: dict[str, list[Callable[[], Any]]] = {
                "opening a store": [lambda: ContextStore(Path(folder)).check_model(turbo)],
                "reading all of the model": [partial(exact_identity, esm)],
                "looking for changes": [partial(model_identity, esm, sampled=False)],
                "looking for changes in the sample, too": [turbo.model.refresh_fingerprint],
                "extension": [extend],
                "extension without checks": [unchecked],
                "extension and its logits": [read],
                "extension and its logits without checks": [read_unchecked],
            }
            seconds = spread(interleave(arms, repeats))
        ratios = {}
        for name in ("extension", "extension and its logits"):
            for arm in (name, f"{name} without checks"):
                seconds[arm] = {key: value / calls for key, value in seconds[arm].items()}
            ratios[f"{name} / without checks"] = ratio(seconds, name, f"{name} without checks")
        return {"seconds": seconds, "ratios": ratios}

    shape = {
        **architecture.described(),
        "context_tokens": residues + 1,
        "new_residues": peptide,
        "preset": DEFAULT_PRESET,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "device_name": device_name(device),
    }
    target = Target(("ratios", "extension / without checks"), at_most=at_most)
    yield Case(f"identity of a model, {device}", architecture.name, shape, check, measure, [target])


@contextlib.contextmanager
def _unchecked(turbo: TurboEsm) -> Iterator[None]:
    """Calls take the identity that was last seen."""
    identity = model_identity(turbo.model.esm, sampled=False)
    with (
        mock.patch.object(cache_engine, "model_identity", lambda *_, **__: identity),
        mock.patch.object(cache_engine, "watch", lambda *_: lambda: False),
    ):
        yield


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
