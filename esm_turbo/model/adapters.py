"""Fine-tuned models: a LoRA adapter in the format of PEFT, merged into the weights of its base model.

A merged model runs as any other, and is another one than its base: caches, stores and calibrations of the base are
refused, and a calibration of its own lies in the adapter's folder.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from esm_turbo.files.extras import install_hint

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Names of weights in the file of an adapter that was trained on a model with a head begin like this.
_WITH_HEAD = "base_model.model.{prefix}."


def is_adapter(source: str | os.PathLike[str]) -> bool:
    """Tell whether a path is the folder of an adapter."""
    return (Path(source) / CONFIG_FILE).is_file()


def base_of(folder: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """The base model of an adapter, a hub id or a folder, and its `revision` if the adapter is one of it.

    Raises:
        ValueError: it is not a LoRA adapter in safetensors, or names no base model.
    """
    try:
        config = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
        kind, base = config["peft_type"], config["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: {CONFIG_FILE} is damaged or lacks an entry ({error!r})") from None
    if kind != "LORA":
        raise ValueError(f"{folder}: adapters of type {kind} are not supported, only LORA")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{folder}: {CONFIG_FILE} names no base model in base_model_name_or_path; add it")
    if not (Path(folder) / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder}: lacks {WEIGHTS_FILE}; save the adapter as safetensors")
    revision = config.get("revision")
    return base, {"revision": revision} if revision else {}


def _check_untied(model: Any) -> None:
    """Check that no weight that an adapter changes is another module's, too, which merging would change with it.

    Raises:
        ValueError: one is.
    """
    modules, kinds = dict(model.named_modules()), ("lora_A", "trainable_tokens_delta")
    # What holds the changes of each adapted module: PEFT ties tokens of adapters as their weights are.
    changes = {name: id(getattr(one, kind)) for name, one in modules.items() for kind in kinds if hasattr(one, kind)}
    owners: dict[int, dict[str, set[int]]] = defaultdict(dict)
    for name, module in modules.items():
        if (weight := module._parameters.get("weight")) is not None:
            changed_by = {held for adapted, held in changes.items() if name.startswith(f"{adapted}.")}
            owners[id(weight)][name.replace(".base_layer", "")] = changed_by
    for sharing in owners.values():
        first, by = max(sharing.items(), key=lambda item: len(item[1]))
        if other := next((name for name, held in sharing.items() if held != by), None):
            raise ValueError(
                f"it changes the weight of {first}, which is that of {other}, too: merged, it would change both; train"
                " one that leaves tied weights out"
            )


def merge_adapter(model: Any, folder: str | os.PathLike[str]) -> None:
    """Add an adapter to the weights of its base model, in place.

    Args:
        model: with a language-model head; an adapter that was trained without one is added to its encoder.
        folder: of the adapter.

    Raises:
        ImportError: peft is missing.
        ValueError: the adapter does not fit the model.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ImportError(f"adapters need peft: {install_hint('adapters')}") from error
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(folder) / WEIGHTS_FILE, framework="pt") as file:
            names = {name for name in file.keys() if "lora_" in name}  # noqa: SIM118 - it has no iterator
        prefix = _WITH_HEAD.format(prefix=model.base_model_prefix)
        target = model if any(name.startswith(prefix) for name in names) else model.base_model
        with warnings.catch_warnings():
            # PEFT calls what newer versions of transformers rename, and warns of weights that are checked below.
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(target, os.fspath(folder))
        added = set(get_peft_model_state_dict(adapted))
        _check_untied(model)
        init = getattr(adapted.peft_config["default"], "init_lora_weights", None)
        if isinstance(init, str) and "_niter_" in init:
            raise ValueError(
                f"init_lora_weights={init!r} takes a part off the base model's weights that each load draws at random;"
                " save it as PEFT converts it (`path_initial_model_for_weight_conversion`)"
            )
        adapted.merge_and_unload()
        # PEFT freezes the base model for training.
        model.requires_grad_(True)
    except (AttributeError, KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{folder}: the adapter cannot be added to its base model: {reason}") from error
    if not names or names - added:
        example = min(names - added, default="no weight of LoRA")
        raise ValueError(f"{folder}: the adapter does not fit its base model, which has no place for {example}")
    model.config._name_or_path = os.fspath(folder)
