"""`esm-turbo info`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from esm_turbo.cli.console import quiet_transformers, show, working
from esm_turbo.cli.inputs import unusable_input
from esm_turbo.cli.options import READS, JsonFile, OptionalInput
from esm_turbo.cli.report import info_report


def info(
    target: Annotated[str | None, READS] = None,
    /,
    *,
    calibration: OptionalInput = None,
    length: int = 1024,
    batch: int = 1,
    json: JsonFile = None,
) -> None:
    """Describe a model, calibration, cache, store or folder of embeddings, and show the sizes of caches.

    Without an argument, describes the embedded model and the environment.

    Args:
        target: Hub id or folder of an ESM-2 checkpoint, or a file, store or folder written by this program.
        calibration: Calibration of the model, to count the bytes of its own caches.
        length: Tokens per protein in the caches, special tokens included.
        batch: Proteins in each cache.
    """
    with working("loading libraries"):
        quiet_transformers()
    from esm_turbo.assets import EMBEDDED_MODEL
    from esm_turbo.cli.info import file_info, model_info
    from esm_turbo.context_store import is_store, store_info
    from esm_turbo.files.kinds import is_embeddings
    from esm_turbo.tasks.embedding.files import embeddings_info

    with unusable_input(f"{target} cannot be read"):
        if target is None:
            result = model_info(EMBEDDED_MODEL, calibration, length, batch)
        elif is_store(target):
            result = store_info(target)
        elif is_embeddings(target):
            result = embeddings_info(target)
        elif Path(target).is_file():
            result = file_info(target, length, batch)
        else:
            result = model_info(target, calibration, length, batch)
    if target is None:
        from esm_turbo.env import environment

        result["environment"] = environment()
    show(*info_report(result), to_json=json, result=result)
