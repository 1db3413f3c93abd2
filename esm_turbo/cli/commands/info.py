"""`esm-turbo info`."""

from __future__ import annotations

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
    """Describe a model, a calibration, caches, embeddings or a store of contexts, and show the sizes of caches.

    Without an argument, describes the embedded model and the environment.

    Args:
        target: Hub id or folder of an ESM-2, ESM-C or E1 checkpoint, or a file, store or folder of this program.
        calibration: Calibration of the model, to count the bytes of its own caches.
        length: Tokens per protein in the caches, special tokens included.
        batch: Proteins in each cache.
    """
    with working("loading libraries"):
        quiet_transformers()
    from esm_turbo.assets import EMBEDDED_MODEL
    from esm_turbo.cli.info import describe

    with unusable_input(f"{target} cannot be read"):
        result = describe(EMBEDDED_MODEL if target is None else target, calibration, length, batch)
    if target is None:
        from esm_turbo.env import environment

        result["environment"] = environment()
    show(*info_report(result), to_json=json, result=result)
