"""Cost of the identity of a model: a first context, opening a store, looking for changes, calls with and without it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, timed
from benchmarks.harness.models import Architecture, described, random_sequences, random_turbo
from esm_turbo import ContextStore, TurboEsm
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.files.identity import model_identity
from esm_turbo.model import cache_engine
from esm_turbo.model.executor import Executor


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
        cache = turbo.prefill(context)

        def extend() -> None:
            for _ in range(calls):
                turbo.extend(cache, new)

        def read() -> None:
            for _ in range(calls):
                turbo.extend(cache, new).logits.cpu()

        def first() -> None:
            encoder = turbo.model.base_model
            encoder.executor = Executor(encoder, encoder.kv)
            turbo.prefill(new)

        with tempfile.TemporaryDirectory() as folder:
            ContextStore(folder).add(turbo, [new])
            arms: dict[str, Callable[[], object]] = {
                "opening a store": lambda: ContextStore(Path(folder)).check_model(turbo),
                "looking for changes in the sample, too": turbo.model.refresh_fingerprint,
            }
            for name, call in {"extension": extend, "extension and its logits": read}.items():
                arms |= {name: call, f"{name} without checks": _unchecked(turbo)(call)}
            seconds = timed(arms, repeats)
        # Last, since captured graphs are lost with what ran them.
        seconds |= timed({"a first context": first}, repeats)
        for arm in seconds:
            if arm.startswith("extension"):
                seconds[arm] = {key: value / calls for key, value in seconds[arm].items()}
        ratios = {
            f"{name} / without checks": seconds[name]["p50"] / seconds[f"{name} without checks"]["p50"]
            for name in ("extension", "extension and its logits")
        }
        return {"seconds": seconds, "ratios": ratios}

    shape = {
        **described(turbo.model),
        "context_tokens": residues + 1,
        "new_residues": peptide,
        "preset": DEFAULT_PRESET,
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
