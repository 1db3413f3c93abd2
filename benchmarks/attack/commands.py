"""The commands under attack: their inputs, their undisturbed results, and what differs from those."""

from __future__ import annotations

import functools
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from benchmarks.attack.trial import Finding, command, faults
from esm_turbo import TurboEsm
from esm_turbo.cli.console import quiet_transformers
from esm_turbo.proteins.fasta import STANDARD_RESIDUES

_SAFETENSORS = ("--format", "safetensors")
_BATCH = ("--toks-per-batch", "80")
COMMANDS: dict[str, tuple[str, ...]] = {
    "embed pt": ("embed", "proteins.fasta", "out", "--include", "mean", "per_tok", "bos", *_BATCH),
    "embed safetensors": ("embed", "proteins.fasta", "out", "--include", "mean", "cache", *_SAFETENSORS, *_BATCH),
    "embed h5": ("embed", "proteins.fasta", "out.h5", "--format", "h5", *_BATCH),
    "embed parquet": ("embed", "proteins.fasta", "out.parquet", "--include", "mean", *_BATCH),
    "store": ("store", "proteins.fasta", "out", *_BATCH),
    "score": ("score", "proteins.fasta", "peptides.csv", "--out", "out.csv", "--json", "out.json"),
    "variants": ("variants", "wild_type.fasta", "variants.csv", "--out", "out.csv", "--json", "out.json"),
    "generate": ("generate", "proteins.fasta", "--max-new-tokens", "2", "--out", "out.fasta", "--json", "out.json"),
    "generate infill": ("generate", "proteins.fasta", "--positions", "2,4-5", "--out", "out.fasta"),
    "calibrate": ("calibrate", "proteins.fasta", "--out", "out.safetensors"),
}  # fmt: skip
"""By name; all paths are relative to the folder of a trial, whose inputs `write_inputs` makes."""

Files = dict[str, bytes]
"""Contents by path within a folder."""
MENDED = 1e-2
"""Tolerance for results that were computed again: a code may fall on the other side of a midpoint."""


@functools.cache
def turbo() -> TurboEsm:
    """The embedded model on the CPU, for trials of the library.

    A process that forks must only load it: threads of its first computation would be missing in its forks. Every trial
    computes in a fork, whose model is its own.
    """
    quiet_transformers()
    return TurboEsm.from_pretrained(device="cpu")


def protein(rng: random.Random, shortest: int = 10, longest: int = 60) -> str:
    """A random protein."""
    return "M" + "".join(rng.choices(STANDARD_RESIDUES, k=rng.randint(shortest, longest) - 1))


_INPUTS = ("proteins.fasta", "wild_type.fasta", "peptides.csv", "variants.csv")


def write_inputs(folder: Path, count: int = 5, longest: int = 40) -> None:
    """The inputs of all commands, always the same for so many proteins of at most so many residues."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    proteins = [protein(rng, 10, longest) for _ in range(count)]
    fasta = "".join(f">p{index} of {count}\n{sequence}\n" for index, sequence in enumerate(proteins))
    (folder / "proteins.fasta").write_text(fasta)
    (folder / "wild_type.fasta").write_text(f">wild\n{proteins[0]}\n")
    (folder / "peptides.csv").write_text("id,sequence\none,GSGSW\ntwo,WKD\nthree,MKT\n")
    changes = "".join(f"{proteins[0][i]}{i + 1}{'A' if proteins[0][i] != 'A' else 'C'},{i / 8}\n" for i in (1, 4, 7))
    (folder / "variants.csv").write_text("mutant,fitness\n" + changes)


def outputs(folder: Path) -> Files:
    """All files of a folder but the inputs."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _INPUTS]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class References:
    """Outputs of undisturbed runs, made once, each in a folder of its own that later trials copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, Files] = {}

    def folder(self, name: str) -> Path:
        """The folder of an undisturbed run, inputs and outputs; not to be written into."""
        self.files(name)
        return self.root / name.replace(" ", "-")

    def files(self, name: str) -> Files:
        """The outputs of an undisturbed run.

        Raises:
            RuntimeError: the command fails, so that nothing can be compared with it.
        """
        if name not in self._files:
            folder = self.root / name.replace(" ", "-")
            write_inputs(folder)
            ended = command(folder, COMMANDS[name])
            if ended.code:
                raise RuntimeError(f"esm-turbo {' '.join(COMMANDS[name])} failed undisturbed: {ended.err.strip()}")
            self._files[name] = outputs(folder)
        return self._files[name]


def differences(found: Mapping[str, bytes], expected: Mapping[str, bytes], *, mended: bool = False) -> list[Finding]:
    """Differences from the outputs of an undisturbed run.

    Args:
        found: files.
        expected: files of the undisturbed run.
        mended: results may have been computed again, in other batches, and then differ by rounding.
    """
    findings = []
    if extra := sorted(found.keys() - expected.keys()):
        findings.append(Finding("left behind", _listed(extra)))
    if missing := sorted(expected.keys() - found.keys()):
        findings.append(Finding("missing", _listed(missing)))
    unequal = [name for name in sorted(expected.keys() & found.keys()) if found[name] != expected[name]]
    if mended:
        unequal = [name for name in unequal if not _same_tensors(name, found[name], expected[name], MENDED)]
    alike = [name for name in unequal if _same_tensors(name, found[name], expected[name], 0.0)]
    if others := [name for name in unequal if name not in alike]:
        findings.append(Finding("different", _listed(others)))
    # The bytes of HDF5 follow the order of writing, which is that of arrival.
    if others := [name for name in alike if not name.endswith(".h5")]:
        findings.append(Finding("bytes", f"other bytes, same tensors: {_listed(others)}"))
    return findings


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same_tensors(name: str, found: bytes, expected: bytes, tolerance: float) -> bool:
    """True if two files hold the same tensors and fields, see `_equal`."""
    read = {".pt": _load_pt, ".safetensors": _load_safetensors, ".h5": _load_h5}.get(Path(name).suffix)
    if read is None:
        return False
    try:
        return _equal(read(found), read(expected), tolerance)
    except (RuntimeError, ValueError, EOFError, OSError, zipfile.BadZipFile, pickle.UnpicklingError, SafetensorError):
        return False


def _load_pt(data: bytes) -> object:
    return torch.load(io.BytesIO(data), weights_only=True)


def _load_safetensors(data: bytes) -> object:
    [length] = struct.unpack("<Q", data[:8])
    return {"metadata": json.loads(data[8 : 8 + length]).get("__metadata__")} | load(data)


def _load_h5(data: bytes) -> object:
    """Attributes and data sets of an HDF5 file; numbers as tensors."""
    import h5py

    found: dict[str, object] = {}

    def add(name: str, item: h5py.Dataset | h5py.Group) -> None:
        found.update({f"{name}@{key}": repr(value) for key, value in item.attrs.items()})
        if isinstance(item, h5py.Dataset):
            is_numbers = item.dtype.kind in "fiu"
            found[name] = torch.from_numpy(np.ascontiguousarray(item[()])) if is_numbers else repr(item[()])

    with h5py.File(io.BytesIO(data)) as file:
        add("/", file)
        file.visititems(add)
    return found


def _equal(one: object, other: object, tolerance: float) -> bool:
    """True if floats agree up to a tolerance relative to the largest, and all but as large a share of integers."""
    if isinstance(one, dict) and isinstance(other, dict):
        if tolerance:
            # Of the results' own bytes.
            one, other = (
                {key: value for key, value in x.items() if not str(key).endswith("sha256")} for x in (one, other)
            )
        return one.keys() == other.keys() and all(_equal(one[key], other[key], tolerance) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        found, expected = _array(one), _array(other)
        if one.is_floating_point() and one.numel():
            return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())
        return bool((found != expected).sum() <= tolerance * one.numel())
    return bool(one == other)


def _array(x: torch.Tensor) -> NDArray[Any]:
    """A tensor in NumPy, since this process must not compute with torch, see `turbo`; floats as float64."""
    if x.dtype == torch.bfloat16:
        return (x.view(torch.int16).numpy().astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.numpy().astype(np.float64) if x.is_floating_point() else x.numpy()


def run_to_end(folder: Path, name: str, references: References) -> list[Finding]:
    """Run a command again after a disturbance: findings where it does not end as an undisturbed run."""
    again = command(folder, COMMANDS[name])
    findings = faults(again)
    if again.code:
        findings.append(Finding("exit", f"the run after it ended with {again.code}: {again.err.strip()[-200:]}"))
    return findings + differences(outputs(folder), references.files(name))
