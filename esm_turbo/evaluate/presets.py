"""The presets of an evaluation, and those of them that cannot run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from esm_turbo.config import PRESETS, TurboConfig
from esm_turbo.tasks.common.forwards import FROZEN

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

ALL = "all"
"""In place of a preset: all presets."""

Presets = Sequence[str | TurboConfig] | Mapping[str, str | TurboConfig] | str | TurboConfig | None


def resolve_presets(turbo: ContextModel, presets: Presets) -> tuple[dict[str, TurboConfig], dict[str, str]]:
    """The options of presets by name, in the order given.

    A preset given by name must be available; presets of `ALL` that this model does not support are left out.

    Args:
        turbo: the model with its calibration.
        presets: names and options, or a mapping with names of the caller's choice; None for full precision and the
            model's own preset.

    Returns:
        The options, and the reason for every preset that is left out.

    Raises:
        ValueError: there is no preset, or one that does not exist or that this model does not support.
    """
    esm = turbo.model.base_model
    if presets is None:
        presets = [FROZEN, esm.turbo_config]
    if isinstance(presets, str | TurboConfig):
        presets = [presets]
    if isinstance(presets, Mapping):
        configs = {name: TurboConfig.from_preset(preset) for name, preset in presets.items()}
        required = set(configs)
    else:
        configs, required = {}, set()
        for preset in presets:
            if preset == ALL:
                configs |= PRESETS
            else:
                config = TurboConfig.from_preset(preset)
                configs[config.name] = config
                required.add(config.name)
    if not configs:
        raise ValueError("`presets` must name at least one preset")
    if esm.calibration is None:
        # Without a calibration, the few presets that remain of `ALL` would look like the whole table.
        required = set(configs)
    unavailable = {}
    for name, config in configs.items():
        try:
            esm.codec(config)
        except ValueError as error:
            if name in required:
                raise
            unavailable[name] = str(error)
    return {name: config for name, config in configs.items() if name not in unavailable}, unavailable
