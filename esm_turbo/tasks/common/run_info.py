"""What a run used: model, arms, device. It is shown when the run begins, and kept with its results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.files.artifacts import package_versions
from esm_turbo.files.identity import kept_digest
from esm_turbo.tasks.common.forwards import arm_preset, context_config
from esm_turbo.tasks.common.options import Arm

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


RUN_COLUMNS = ("run_model", "run_preset", "run_device")
"""Columns in which a table names its run; those of an earlier run are not kept."""


@dataclass(frozen=True)
class RunInfo:
    """What a run used.

    Attributes:
        model: hub id of the model, or the name of its folder.
        arms: the preset of the contexts of each arm; None where none are stored.
        device: of the model, such as `cpu`.
        dtype: of the model, such as `float32`.
        threads: number of threads on a CPU; None elsewhere.
        demonstration: whether the model is the embedded one, which is too small for real work.
    """

    model: str
    arms: dict[Arm, str | None]
    device: str
    dtype: str
    threads: int | None
    demonstration: bool

    @classmethod
    def of(cls, turbo: ContextModel, arms: Sequence[Arm] = ()) -> RunInfo:
        """Describe a run before it begins.

        Args:
            turbo: the model.
            arms: those that run; none for a run that neither reads nor writes contexts.

        Raises:
            ValueError: an arm cannot run, since its contexts need a calibration and there is none.
        """
        presets = {arm: arm_preset(turbo, arm) for arm in arms}
        if "turbo" in arms:
            turbo.model.base_model.codec(turbo.model.base_model.turbo_config)
        device, dtype = str(turbo.model.device), str(turbo.model.dtype).removeprefix("torch.")
        threads = torch.get_num_threads() if device == "cpu" else None
        return cls(
            turbo.name, presets, device, dtype, threads, Path(turbo.model.config._name_or_path) == EMBEDDED_MODEL
        )

    def __str__(self) -> str:
        named = [arm if preset is None else f"{arm} (preset {preset})" for arm, preset in self.arms.items()]
        arms = [f"arm{'s' if len(named) > 1 else ''} {', '.join(named)}"] if named else []
        threads = [] if self.threads is None else [f"{self.threads} thread{'s' if self.threads > 1 else ''}"]
        return ", ".join([f"model {self.model}", *arms, f"device {self.device}", self.dtype, *threads])

    def cells(self, arm: Arm | None = None) -> list[str]:
        """What a table says of its run in `RUN_COLUMNS`: in a row of one arm, or in one of all of them."""
        if arm is not None:
            return [self.model, self.arms[arm] or "", self.device]
        presets = {arm: preset for arm, preset in self.arms.items() if preset is not None}
        named = presets.values() if len(self.arms) == 1 else (f"{arm}={preset}" for arm, preset in presets.items())
        return [self.model, " ".join(named), self.device]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def run_metadata(run: RunInfo | None, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the metadata of a file say of its run: what it used, and its options."""
    return {"run": None if run is None else run.to_dict(), "settings": dict(settings or {})}


def context_arm(turbo: ContextModel) -> Arm:
    """The arm whose contexts a model writes under its own preset."""
    return "frozen" if turbo.model.base_model.turbo_config.codec == "exact" else "turbo"


def run_settings(turbo: ContextModel, arms: Sequence[Arm]) -> dict[Arm, dict[str, Any]]:
    """For each arm all that scores depend on besides sequences and options, up to rounding, as JSON values."""
    shared = {
        "versions": package_versions(),
        "weights": kept_digest(turbo.model),
        "dtype": str(turbo.model.dtype).removeprefix("torch."),
        "device": turbo.model.device.type,
    }
    settings: dict[Arm, dict[str, Any]] = {}
    for arm in arms:
        settings[arm] = shared | {"arm": arm}
        if arm != "full":
            config = context_config(turbo, arm)
            codec = turbo.model.base_model.codec(config).fingerprint
            settings[arm] |= {"preset": config.to_dict(), "codec": hashlib.sha256(codec.tobytes()).hexdigest()}
    return settings
