"""`calibration="auto"`: calibrates on the shipped proteins once and keeps the result in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from esm_turbo.assets import calibration_families, calibration_proteins
from esm_turbo.calibration import READABLE_VERSIONS, Calibration
from esm_turbo.config import Geometry
from esm_turbo.files.fingerprint import model_fingerprint, same_model
from esm_turbo.proteins.fasta import read_fasta_strict, sha256_file
from esm_turbo.tasks.calibration.records import calibrate_records
from esm_turbo.tasks.common.progress import Progress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.files.quality import Quality

_log = logging.getLogger(__name__)


def auto_calibration(
    turbo: ContextModel, progress: Progress | None = None, measure: Callable[..., Quality | None] | None = None
) -> Calibration:
    """Calibrate a model on the shipped proteins, or read the calibration from the cache folder if it is there.

    A damaged file is ignored and written again. If the folder cannot be written, the calibration is returned without
    being kept.

    Args:
        progress: as for `calibrate_records` and `measure`; not called if the calibration is read.
        measure: called with the model, a new calibration, the proteins that it has seen, and `progress=`; returns its
            quality, as `evaluate.calibrated.measure_calibration` does. None leaves it unknown.

    Raises:
        ValueError: the model's weights are not finite.
    """
    has_families = turbo.model.base_model.exact_contexts is not None
    fasta = calibration_families() if has_families else calibration_proteins()
    folder = calibration_folder()
    # A file's name begins with a digest of the oldest format still read, the proteins and the model's shape.
    prefix = _digest(f"{READABLE_VERSIONS[0]} {sha256_file(fasta)} {Geometry.of(turbo.model.config)}".encode())
    calibration = _saved(folder, prefix, turbo)
    if calibration is not None:
        return calibration
    path = folder / f"{prefix}-{_digest(model_fingerprint(turbo.model.base_model).tobytes())}.safetensors"
    _log.info("calibrating on the shipped proteins, once for this model; the result is kept in %s", path)
    records = read_fasta_strict(fasta)
    calibration = calibrate_records(turbo, records, source=fasta, progress=progress)
    if measure is not None:
        calibration.quality = measure(turbo, calibration, records, progress=progress)
    try:
        calibration.save(path)
    except OSError as error:
        _log.warning("the calibration cannot be saved for later runs: %s", error)
    return calibration


def calibration_folder() -> Path:
    """The folder in the user's cache where calibrations are kept."""
    from platformdirs import user_cache_path

    return user_cache_path("esm_turbo", appauthor=False) / "calibrations"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _saved(folder: Path, prefix: str, turbo: ContextModel) -> Calibration | None:
    """The calibration of this model in the folder, if there is one.

    Digests of fingerprints do not suffice to find it: dtype and device change a fingerprint's last digits.
    """
    own = model_fingerprint(turbo.model.base_model)
    for path in sorted(folder.glob(f"{prefix}-*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                weights = file.get_tensor("weights")
            if same_model(weights, own):
                return Calibration.load(path, model=turbo.model)
        except (SafetensorError, ValueError, OSError) as error:
            _log.warning("%s is ignored: %s", path, error)
    return None
