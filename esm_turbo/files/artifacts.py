"""safetensors files with string metadata: atomic writes, strict reads, one-line errors."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from esm_turbo.files.writing import replacing

_OWN_METADATA = ("kind", "format_version", "sha256")
_METADATA = '{"__metadata__":'


class ArtifactError(ValueError):
    """A file is damaged, of another kind, or of another format version."""


def write_artifact(
    path: str | os.PathLike[str], kind: str, version: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> None:
    """Write tensors and metadata (as JSON) to a safetensors file, atomically."""
    strings = {"kind": kind, "format_version": str(version)}
    strings |= {name: json.dumps(value, sort_keys=True) for name, value in metadata.items()}
    on_host = {**tensors, **_brought_over({name: x for name, x in tensors.items() if x.device.type == "cuda"})}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in on_host.items()}
    strings["sha256"] = _digest(contiguous, strings)
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=strings)
        _sort_metadata(temporary)


def read_artifact(
    path: str | os.PathLike[str], kind: str, *versions: int, mapped: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_artifact` wrote, in one of these versions.

    Args:
        path: the file.
        kind: as written.
        *versions: that can be read.
        mapped: leave the tensors in the file, for a caller that copies them: they change with it.

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
            if strings.get("format_version") not in [str(version) for version in versions]:
                raise ArtifactError(
                    f"{path}: {kind} format version {strings.get('format_version')}, this release reads"
                    f" {' and '.join(map(str, versions))};"
                    " write it again with this release, or install the release that wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if not mapped:
                # By bytes, so that the checksum is of all bits: those of a damaged bool are lost in a copy.
                tensors = {
                    name: tensor.reshape(-1).view(torch.uint8).clone().view(tensor.dtype).reshape(tensor.shape)
                    for name, tensor in tensors.items()
                }
        if strings.get("sha256") != _digest(tensors, strings):
            raise ArtifactError(f"{path}: the content does not match its checksum: the file was altered")
        metadata = {name: json.loads(value) for name, value in strings.items() if name not in _OWN_METADATA}
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        # Too little memory says nothing about the file.
        if "annot allocate memory" in str(error):
            raise
        raise ArtifactError(f"{path}: damaged or not a safetensors file ({error})") from error
    return tensors, metadata


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    names = ("esm_turbo", "torch", "transformers", "numpy", "scipy", "safetensors")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _brought_over(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a device's tensors that share their memory, in one copy on the host: a cache has hundreds in one buffer.

    Tensors that are less than half of their memory are left out.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    found = {}
    for names in sharing.values():
        storage = tensors[names[0]].untyped_storage()
        if len(names) > 1 and 2 * sum(tensors[name].nbytes for name in names) >= storage.nbytes():
            host = storage.cpu()
            for name in names:
                x = tensors[name]
                found[name] = torch.empty(0, dtype=x.dtype).set_(host, x.storage_offset(), x.shape, x.stride())
    return found


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order, so that equal content has equal bytes: the library shuffles."""
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little")).decode()
        if header.startswith(_METADATA):
            strings, end = json.JSONDecoder().raw_decode(header, len(_METADATA))
            old = header[len(_METADATA) : end].encode()
            new = json.dumps(strings, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
            if len(new) == len(old):
                file.seek(8 + len(_METADATA))
                file.write(new)


def _digest(tensors: Mapping[str, Tensor], strings: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(set(strings) - {"sha256"}):
        digest.update(f"{name}\0{strings[name]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
