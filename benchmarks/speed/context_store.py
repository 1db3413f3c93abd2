"""The context store: reading a context compared with computing it, and further compression of its files."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.embedded import embedded, evaluation_set
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, ratio, spread, worst
from benchmarks.harness.models import Architecture, random_sequences, random_turbo
from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from esm_turbo.config import Geometry

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
    turbo = random_turbo(architecture, preset, device)
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
        return _finish(store.get_or_prefill(turbo, sequence))

    def compute() -> TurboKVCache:
        return _finish(turbo.prefill(sequence))

    def check() -> Check:
        expected = turbo.extend(compute(), _EXTENSION).logits
        errors = []
        for store in stores.values():
            # The first fetch fills the store and its memory, the second reads them.
            for _ in range(2):
                errors.append(float((turbo.extend(fetch(store), _EXTENSION).logits - expected).abs().max()))
        misses = disk.info()["usage"]["missed"]
        errors.append(0.0 if misses == 1 else float("inf"))
        what = "logits of an extension against those on a new prefill, largest difference"
        return Check(what, worst(errors), _EXACTLY)

    def measure(repeats: int) -> Figures:
        arms: dict[str, list[Callable[[], object]]] = {"prefill": [compute]}
        arms |= {where: [partial(fetch, store)] for where, store in stores.items()}
        seconds = spread(interleave(arms, repeats))
        stored = disk.info()
        cache = compute()
        return {
            "seconds": seconds,
            "ratios": {f"prefill / {where}": ratio(seconds, "prefill", where) for where in stores},
            "bytes": {"file": stored["bytes"], "cache": cache.nbytes},
        }

    geometry = Geometry.of(turbo.model.config)
    return Case(
        name=f"{name}, {residues} residues, {turbo.model.device.type}",
        model=name,
        shape={
            "residues": residues,
            "preset": turbo.model.esm.turbo_config.name,
            "layers": geometry.num_layers,
            "heads": geometry.num_heads,
            "head_dim": geometry.head_dim,
            "dtype": str(turbo.model.dtype).removeprefix("torch."),
            "device": turbo.model.device.type,
            "device_name": device_name(turbo.model.device),
            "files": "in the page cache",
        },
        check=check,
        measure=measure,
        targets=[Target(("ratios", f"prefill / {where}"), at_least=1.0) for where in stores],
    )


def _finish(cache: TurboKVCache) -> TurboKVCache:
    """Wait for the device before the clock stops."""
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return cache


def compression_cases(presets: Sequence[str], levels: Sequence[int], domains: int, longs: int) -> Iterator[Case]:
    """zstandard on the files of real contexts; no cases without the package."""
    try:
        import zstandard
    except ImportError:
        print("store_compression: needs pip install 'esm-turbo[benchmark]'")
        return
    records = [*evaluation_set("cath_val200", domains), *evaluation_set("long_human", longs)]
    calibration = embedded().calibration
    for preset in presets:
        turbo = TurboEsm.from_pretrained(calibration=calibration, preset=preset, device="cpu")
        yield _compression_case(turbo, [record.sequence for record in records], levels, zstandard)


def _compression_case(turbo: TurboEsm, sequences: Sequence[str], levels: Sequence[int], zstandard: Any) -> Case:
    contents: list[bytes] = []
    preset = turbo.model.esm.turbo_config.name

    def check() -> Check:
        with tempfile.TemporaryDirectory() as folder:
            ContextStore(folder, host_bytes=0).add(turbo, sequences)
            # Files of contexts are named by a hash, unlike the other files of a store.
            contents[:] = [path.read_bytes() for path in Path(folder).rglob("*") if len(path.stem) == 64]
        wrong = float(len(contents) != len(sequences))
        for content in contents:
            packed = zstandard.ZstdCompressor(level=levels[0]).compress(content)
            wrong += zstandard.ZstdDecompressor().decompress(packed) != content
        return Check("files that zstandard does not give back", wrong, _EXACTLY)

    def measure(repeats: int) -> Figures:
        packed = {n: [zstandard.ZstdCompressor(level=n).compress(c) for c in contents] for n in levels}
        arms: dict[str, list[Callable[[], object]]] = {"sha256": [partial(_hash, contents)]}
        for n in levels:
            arms[f"decompress {n}"] = [partial(_decompress, zstandard, packed[n])]
        seconds = spread(interleave(arms, repeats))
        for n in levels:
            begin = time.perf_counter()
            for content in contents:
                zstandard.ZstdCompressor(level=n).compress(content)
            seconds[f"compress {n}"] = dict.fromkeys(("p20", "p50", "p80"), time.perf_counter() - begin)
        size = sum(map(len, contents))
        return {
            "seconds": seconds,
            "bytes": {"files": size, **{f"zstd {n}": sum(map(len, packed[n])) for n in levels}},
            "ratios": {
                **{f"bytes zstd {n} / files": sum(map(len, packed[n])) / size for n in levels},
                **{f"seconds decompress {n} / sha256": ratio(seconds, f"decompress {n}", "sha256") for n in levels},
            },
        }

    return Case(
        name=preset,
        model="esm2-mini",
        shape={
            "preset": preset,
            "contexts": len(sequences),
            "residues": sum(map(len, sequences)),
            "zstandard": zstandard.__version__,
        },
        check=check,
        measure=measure,
    )


def _hash(contents: Sequence[bytes]) -> None:
    for content in contents:
        hashlib.sha256(content).digest()


def _decompress(zstandard: Any, packed: Sequence[bytes]) -> None:
    for content in packed:
        zstandard.ZstdDecompressor().decompress(content)
