"""safetensors files with string metadata: atomic writes, strict reads, one-line errors."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_OWN_METADATA = ("kind", "format_version", "sha256")


class ArtifactError(ValueError):
    """A file is not what it should be: damaged, of another kind, or of a newer format."""


def write_artifact(
    path: str | os.PathLike[str], kind: str, version: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> None:
    """Writes tensors and metadata (as JSON) to a safetensors file, whole or not at all."""
    strings = {"kind": kind, "format_version": str(version)}
    strings |= {name: json.dumps(value, sort_keys=True) for name, value in metadata.items()}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    strings["sha256"] = _digest(contiguous, strings)
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=strings)


def read_artifact(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `write_artifact` wrote.

    Raises:
        ArtifactError: the file is missing, damaged, of another kind, or of another format version.
    """
    path = Path(path)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such {kind} file")
    try:
        with safe_open(path, framework="pt") as file:
            strings = file.metadata() or {}
            if strings.get("kind") != kind:
                raise ArtifactError(f"{path}: not an esm_turbo {kind} (its metadata says {strings.get('kind')!r})")
            if strings.get("format_version") != str(version):
                raise ArtifactError(
                    f"{path}: {kind} format version {strings.get('format_version')}, this release reads {version};"
                    " write it again with this release, or install the release that wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if strings.get("sha256") != _digest(tensors, strings):
            raise ArtifactError(f"{path}: the content does not match its checksum: the file was altered")
        metadata = {name: json.loads(value) for name, value in strings.items() if name not in _OWN_METADATA}
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path}: damaged or not a safetensors file ({error})") from error
    return tensors, metadata


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path in the same folder and renames it to `path` on success; on failure nothing is left.

    Where `path` is a link, the file that it leads to is replaced. A device or a pipe, such as `/dev/stdout`, stays what
    it is, and is written to on success.
    """
    path = Path(path)
    passed_on = is_device(path)
    if path.is_symlink() and not passed_on:
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.gettempdir() if passed_on else path.parent
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=folder)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if passed_on:
            with temporary.open("rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
            return
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_device(path: str | os.PathLike[str]) -> bool:
    """Whether something is there that is neither a file nor a folder: a device, a pipe."""
    path = Path(path)
    return path.exists() and not path.is_file() and not path.is_dir()


def _digest(tensors: Mapping[str, Tensor], strings: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(set(strings) - {"sha256"}):
        digest.update(f"{name}\0{strings[name]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    names = ("esm_turbo", "torch", "transformers", "numpy", "scipy", "safetensors")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
