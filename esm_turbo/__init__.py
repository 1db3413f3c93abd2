"""Compressed key/value caches for the protein language models ESM-2, ESM-C and E1.

Public names are loaded on first use: importing the package itself imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "TurboEsm": "turbo_esm",
    "TurboEsmModel": "modeling_esm_turbo",
    "TurboEsmForMaskedLM": "modeling_esm_turbo",
    "TurboEsmSelfAttention": "modeling_esm_turbo",
    "TurboEsmcModel": "modeling_esmc_turbo",
    "TurboEsmcForMaskedLM": "modeling_esmc_turbo",
    "TurboConfig": "config",
    "TurboKVCache": "kv_cache",
    "KVCalibrator": "calibrate",
    "Calibration": "calibration",
    "ContextStore": "context_store",
    "Workers": "parallel.workers",
    "read_fasta": "proteins.fasta",
    "read_homologs": "proteins.alignments",
    "EmbeddingRequest": "tasks.embedding.request",
    "iter_embeddings": "tasks.embedding.embed",
    "embed_records": "tasks.embedding.records",
    "read_embedding": "tasks.embedding.files",
    "calibrate_records": "tasks.calibration.records",
}

__all__ = [  # noqa: RUF022 - in reading order
    "TurboEsm",
    "TurboEsmModel",
    "TurboEsmForMaskedLM",
    "TurboEsmSelfAttention",
    "TurboEsmcModel",
    "TurboEsmcForMaskedLM",
    "TurboConfig",
    "TurboKVCache",
    "KVCalibrator",
    "Calibration",
    "ContextStore",
    "Workers",
    "read_fasta",
    "read_homologs",
    "EmbeddingRequest",
    "iter_embeddings",
    "embed_records",
    "read_embedding",
    "calibrate_records",
    "__version__",
]

if TYPE_CHECKING:
    from esm_turbo.calibrate import KVCalibrator
    from esm_turbo.calibration import Calibration
    from esm_turbo.config import TurboConfig
    from esm_turbo.context_store import ContextStore
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.modeling_esm_turbo import TurboEsmForMaskedLM, TurboEsmModel, TurboEsmSelfAttention
    from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM, TurboEsmcModel
    from esm_turbo.parallel.workers import Workers
    from esm_turbo.proteins.alignments import read_homologs
    from esm_turbo.proteins.fasta import read_fasta
    from esm_turbo.tasks.calibration.records import calibrate_records
    from esm_turbo.tasks.embedding.embed import iter_embeddings
    from esm_turbo.tasks.embedding.files import read_embedding
    from esm_turbo.tasks.embedding.records import embed_records
    from esm_turbo.tasks.embedding.request import EmbeddingRequest
    from esm_turbo.turbo_esm import TurboEsm


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
