"""The context store: reading a context compared with computing it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, ratios, timed, worst
from benchmarks.harness.models import Architecture, described, random_sequences, random_turbo
from esm_turbo import ContextStore, TurboEsm, TurboKVCache

_EXTENSION = "GSGSWKDLAE"
# Reading returns the same bytes.
_EXACTLY = 0.0


def embedded_cases(residues: Sequence[int], preset: str) -> Iterator[Case]:
    """The embedded model, on the CPU."""
    turbo = TurboEsm.from_pretrained(preset=preset, device="cpu")
    for n in residues:
        yield _case("esm2-mini", turbo, n)


def random_cases(
    architecture: Architecture, residues: Sequence[int], preset: str, device: str = "cpu"
) -> Iterator[Case]:
    """Random weights in the geometry of a larger model; no cases without the device."""
    if device == "cuda" and not torch.cuda.is_available():
        return
    turbo = random_turbo(architecture, preset, device, torch.bfloat16 if device == "cuda" else torch.float32)
    for n in residues:
        yield _case(architecture.name, turbo, n)


def _case(name: str, turbo: TurboEsm, residues: int) -> Case:
    [sequence] = random_sequences([residues], seed=residues)
    on_device = turbo.model.device.type != "cpu"
    # Deleted with the case.
    folder = tempfile.TemporaryDirectory()
    disk = ContextStore(folder.name, host_bytes=0, device_bytes=0)
    stores = {"disk": disk, "host memory": ContextStore(folder.name, device_bytes=0)}
    if on_device:
        stores["device memory"] = ContextStore(folder.name)

    def fetch(store: ContextStore, folder: object = folder) -> TurboKVCache:
        return store.get_or_prefill(turbo, sequence)

    def check() -> Check:
        # On a GPU, calls that recur are captured, and round otherwise in half precision.
        for _ in range(3):
            expected = turbo.extend(fetch(disk), _EXTENSION).logits
        errors = []
        for store in stores.values():
            # The first fetch fills the store and its memory, the second reads them.
            for _ in range(2):
                errors.append(largest_difference(turbo.extend(fetch(store), _EXTENSION).logits, expected))
        misses = disk.info()["usage"]["missed"]
        errors.append(0.0 if misses == 1 else float("inf"))
        what = "logits of an extension against those on the context as it was computed, largest difference"
        return Check(what, worst(errors), _EXACTLY)

    def measure(repeats: int) -> Figures:
        arms: dict[str, Callable[[], object]] = {"prefill": partial(turbo.prefill, sequence)}
        seconds = timed(arms | {where: partial(fetch, store) for where, store in stores.items()}, repeats)
        return {
            "seconds": seconds,
            "ratios": ratios(seconds, *(("prefill", where) for where in stores)),
            "bytes": {"file": disk.info()["bytes"], "cache": turbo.prefill(sequence).nbytes},
        }

    return Case(
        name=f"{name}, {residues} residues, {turbo.model.device.type}",
        model=name,
        shape={
            "residues": residues,
            "preset": turbo.model.esm.turbo_config.name,
            **described(turbo.model),
            "files": "in the page cache",
        },
        check=check,
        measure=measure,
        targets=[Target(("ratios", f"prefill / {where}"), at_least=1.0) for where in stores],
    )
