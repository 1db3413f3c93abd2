"""Descriptions of models, calibrations, caches and embeddings, and the sizes of caches."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import EsmConfig

from esm_turbo.calibrate import KVCalibrator
from esm_turbo.calibration import Calibration
from esm_turbo.codecs import KVCodec
from esm_turbo.config import PRODUCT_PRESETS, Geometry, TurboConfig
from esm_turbo.context_store import is_store, store_info
from esm_turbo.files.artifacts import ArtifactError
from esm_turbo.files.hub import full_name, local_files_only, not_found
from esm_turbo.files.identity import UNKNOWN_MODEL
from esm_turbo.files.kinds import (
    CALIBRATION_FILE,
    INDEX_FILE,
    SETTINGS_FILE,
    STORE_FILE,
    is_embeddings,
    is_h5,
    is_parquet,
    is_zip,
)
from esm_turbo.files.parquet import parquet_info
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.model.adapters import base_of, is_adapter
from esm_turbo.model.checkpoints import checkpoint_class
from esm_turbo.modeling_esm_turbo import TurboEsmModel
from esm_turbo.ops.backends import TorchBackend
from esm_turbo.parallel.shards import SUFFIX
from esm_turbo.store.files import STORED_KINDS, stored_info
from esm_turbo.tasks.embedding import h5
from esm_turbo.tasks.embedding.files import pt_info, read_embedding, read_settings
from esm_turbo.tasks.embedding.index import EmbeddingIndex

_CLS, _RESIDUE = 0, 5
# Tokens; a multiple of the group size of every codec.
_BLOCK = 64
_FLOAT_BYTES = {"fp32": 4, "fp16": 2}


def describe(
    target: str | os.PathLike[str],
    calibration: str | os.PathLike[str] | None = None,
    length: int = 1024,
    batch_size: int = 1,
) -> dict[str, Any]:
    """Describe a model, or an artifact of this package.

    Args:
        target: hub id or folder of a model; an artifact, store, folder or file of embeddings, or a table in Parquet.
        calibration: see `model_info`, as are `length` and `batch_size`.

    Raises:
        ValueError: the file is damaged, of another format version, or of another program.
        ModelNotFoundError: (an OSError) there is no such model, or the hub cannot be reached.
    """
    path = Path(target)
    if is_store(path):
        return store_info(path)
    if is_embeddings(path) or is_h5(path):
        return embeddings_info(path)
    if path.is_dir() and path.name.endswith(SUFFIX):
        whole = path.with_name(path.name.removesuffix(SUFFIX))
        raise ArtifactError(f"{path}: is a folder of shards; esm-turbo status {whole} tells what is done")
    if not path.is_file():
        return model_info(target, calibration, length, batch_size)
    # Parts of a folder stand for the whole.
    if path.name in (INDEX_FILE, SETTINGS_FILE) and is_embeddings(path.parent):
        return embeddings_info(path.parent)
    if path.name == STORE_FILE:
        return store_info(path.parent)
    if is_parquet(path):
        return parquet_info(path)
    if is_zip(path):
        return pt_info(path)
    return file_info(path, length, batch_size)


def embeddings_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of the embeddings in a folder or an HDF5 file, and their number of proteins.

    Raises:
        ValueError: they are damaged, or not of this package.
        ImportError: h5py is missing.
    """
    path = Path(path)
    if path.is_dir():
        settings, proteins = read_settings(path), len(list(EmbeddingIndex(path / INDEX_FILE).rows))
    else:
        settings, proteins = h5.settings(path), h5.proteins(path)
    # The options of caches are not a cache.
    settings = {"cache_options" if name == "cache" else name: x for name, x in settings.items() if name != "probe"}
    return {"kind": "embeddings", "proteins": proteins, "format": settings.pop("format", "h5"), **settings}


def model_info(
    source: str | os.PathLike[str],
    calibration: str | os.PathLike[str] | None = None,
    length: int = 1024,
    batch_size: int = 1,
) -> dict[str, Any]:
    """Geometry of a model, from its configuration alone, and the sizes of its caches.

    Args:
        source: folder or hub id of a checkpoint.
        calibration: whose codecs give the sizes; None for the one in the folder, if any.
        length: tokens per protein.
        batch_size: proteins per cache.

    Raises:
        ValueError: the checkpoint is of no supported family, or the calibration is damaged or of another geometry.
        ModelNotFoundError: (an OSError) there is no such model, or the hub cannot be reached.
    """
    source = folder = full_name(os.fspath(source))
    options: dict[str, Any] = {}
    if is_adapter(source):
        base, options = base_of(source)
        source = full_name(base)
    options["local_files_only"] = local_files_only(source)
    try:
        encoder = checkpoint_class(source, options, head=False)
        encoder.check_checkpoint(source, options)
        config = encoder.config_class.from_pretrained(source, **options)
    except OSError as error:
        raise not_found(source) from error
    geometry = Geometry.of(config)
    in_folder = Path(folder) / CALIBRATION_FILE
    if calibration is None and in_folder.is_file():
        calibration = in_folder
    loaded = None if calibration is None else Calibration.load(calibration)
    if loaded is not None and (difference := loaded.geometry.unlike(geometry)):
        raise ValueError(f"the calibration is {difference}; give this model's own")
    return {
        "kind": "model",
        "model": Path(folder).name if os.path.isdir(folder) else folder,
        "geometry": geometry.to_dict(),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "calibrated": loaded is not None,
        "cache": cache_sizes(geometry, loaded, length, batch_size),
    }


def file_info(path: str | os.PathLike[str], length: int = 1024, batch_size: int = 1) -> dict[str, Any]:
    """Contents of an artifact of this package, after verifying its checksum.

    Args:
        path: a calibration, a cache, an embedding or a file of a store, as a safetensors file.
        length: tokens per protein, for the sizes of a calibration's caches.
        batch_size: proteins per cache, likewise.

    Raises:
        ValueError: the file is damaged, of another format version, or not written by this package.
    """
    kind = _kind(path)
    if kind == "calibration":
        calibration = Calibration.load(path)
        return {
            "kind": kind,
            "geometry": calibration.geometry.to_dict(),
            "provenance": calibration.provenance,
            "quality": None if calibration.quality is None else calibration.quality.to_dict(),
            "calibration_bytes": calibration.nbytes,
            "cache": cache_sizes(calibration.geometry, calibration, length, batch_size),
        }
    if kind == "cache":
        cache = TurboKVCache.load(path)
        return {
            "kind": kind,
            "geometry": cache.geometry.to_dict(),
            "preset": cache.config.name,
            "options": cache.config.to_dict(),
            "lengths": cache.lengths.tolist(),
            "bytes": cache.nbytes,
            "bits_per_element": cache.bits_per_element if int(cache.lengths.sum()) else None,
        }
    if kind == "embedding":
        metadata, tensors = read_embedding(path)
        return {"kind": kind, **metadata, "tensors": {name: list(t.shape) for name, t in sorted(tensors.items())}}
    if kind in STORED_KINDS:
        return stored_info(path, kind)
    raise ArtifactError(f"{path}: is not a calibration, cache or embedding of esm_turbo; give one, or a model")


def cache_sizes(geometry: Geometry, calibration: Calibration | None, length: int, batch_size: int) -> dict[str, Any]:
    """Bytes of a cache with the product presets and as plain arrays.

    Args:
        geometry: of the model.
        calibration: whose codecs give the sizes; None for codecs fitted to noise, which store as many bytes.
        length: tokens per protein.
        batch_size: proteins per cache.

    Raises:
        ValueError: `length` or `batch_size` is not positive.
    """
    if length < 1 or batch_size < 1:
        raise ValueError(f"`length` and `batch` must be at least 1, got {length} and {batch_size}")
    elements = geometry.elements_per_token * length * batch_size
    sizes = {name: float(size * elements) for name, size in _FLOAT_BYTES.items()}
    for name, config in PRODUCT_PRESETS.items():
        if calibration is not None:
            sizes[name] = stored_bytes(calibration.codec(config), length) * batch_size
        else:
            sizes[name] = _bytes_without_calibration(config, geometry, length) * batch_size
    return {
        "tokens": length,
        "batch_size": batch_size,
        "presets": {
            name: {"bytes": round(size), "bits_per_element": 8 * size / elements, "ratio_to_fp32": 4 * elements / size}
            for name, size in sizes.items()
        },
    }


def stored_bytes(codec: KVCodec, length: int) -> float:
    """Bytes of one protein of `length` tokens in a cache of this codec.

    Long proteins are extrapolated from two short ones with the same remainder modulo the block size, since all blocks
    take the same number of bytes.
    """
    if length < 2 * _BLOCK:
        return _bytes_of(codec, length)
    short = _BLOCK + length % _BLOCK
    first, second = (_bytes_of(codec, tokens) for tokens in (short, short + _BLOCK))
    return first + (length - short) // _BLOCK * (second - first)


def _bytes_of(codec: KVCodec, tokens: int) -> int:
    geometry = codec.geometry
    cache = TurboKVCache(codec.config, geometry, UNKNOWN_MODEL, codec)
    input_ids = torch.tensor([[_CLS, *[_RESIDUE] * (tokens - 1)]])
    append = cache.plan_append(input_ids, torch.ones_like(input_ids, dtype=torch.bool), None, (_CLS,))
    states = torch.zeros(1, geometry.num_heads, tokens, geometry.head_dim)
    backend = TorchBackend()
    for layer_idx in range(geometry.num_layers):
        cache.stage(append, layer_idx, states, states, backend)
    cache.commit(append)
    return cache.nbytes


def _bytes_without_calibration(config: TurboConfig, geometry: Geometry, length: int) -> float:
    """As `stored_bytes`, with codecs fitted to noise, extrapolated from one and two heads, which take equal bytes."""
    one, two = (stored_bytes(_noise_calibration(heads, geometry.head_dim).codec(config), length) for heads in (1, 2))
    return one + (geometry.num_layers * geometry.num_heads - 1) * (two - one)


@functools.cache
def _noise_calibration(num_heads: int, head_dim: int) -> Calibration:
    """A calibration of one layer of random weights on random residues."""
    config = EsmConfig(
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        num_hidden_layers=1,
        intermediate_size=head_dim,
        position_embedding_type="rotary",
        token_dropout=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        calibrator = KVCalibrator(TurboEsmModel(config), sample_size=128)
        calibrator.partial_fit(torch.randint(_RESIDUE, _RESIDUE + 20, (2, 128)))
        return calibrator.finalize([])


def _kind(path: str | os.PathLike[str]) -> str | None:
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise ArtifactError(f"{path}: is not a file of esm_turbo, or a damaged one") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error
    return metadata.get("kind")
