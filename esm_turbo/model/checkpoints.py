"""Loading and saving of ESM-2 checkpoints, and checks of what they hold."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import EsmConfig, EsmForMaskedLM, EsmModel, PreTrainedConfig

from esm_turbo.calibration import Calibration
from esm_turbo.config import DEFAULT_PRESET, Backend, TurboConfig
from esm_turbo.files.kinds import CALIBRATION_FILE
from esm_turbo.model.heads import mark_missing_heads
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.model.packed_encoder import is_recorder

_INV_FREQ = "rotary_embeddings.inv_freq"
# transformers 5 saves one key for all layers, with an asterisk for the layer's number.
_PUBLISHED_INV_FREQ = r"encoder\.layer\.(?:\d+|\*)\.attention\.self\.rotary_embeddings\.inv_freq"
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file;'
    " state = torch.load('pytorch_model.bin', map_location='cpu', weights_only=False);"
    " save_file({k: v.clone() for k, v in state.items()}, 'model.safetensors', metadata={'format': 'pt'})\""
)


# Fields of config.json that decide results and for which transformers has a default.
_DECIDING: dict[str, tuple[type, ...]] = {
    "token_dropout": (bool,),
    "emb_layer_norm_before": (bool,),
    "layer_norm_eps": (float,),
    "mask_token_id": (int,),
    "pad_token_id": (int,),
    "vocab_size": (int,),
    "hidden_size": (int,),
    "num_hidden_layers": (int,),
    "num_attention_heads": (int,),
    "intermediate_size": (int,),
}


class WithoutRecorders:
    """Pickles and copies a module without what transformers installs to record hidden states, which is not picklable.

    The next forward that needs it installs it again.
    """

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_output_capturing_hooks_installed", None)
        hooks = state["_forward_hooks"]
        state["_forward_hooks"] = type(hooks)((key, hook) for key, hook in hooks.items() if not is_recorder(hook))
        return state


class CheckpointMixin(WithoutRecorders):
    """How models of both classes are made and saved."""

    config: EsmConfig

    @classmethod
    def from_esm(cls, model: EsmModel | EsmForMaskedLM, **turbo: Any) -> Self:
        """Convert Hugging Face's model of the same kind, which stays unchanged; both share their weights.

        Args:
            model: an `EsmModel` or an `EsmForMaskedLM`.
            **turbo: as in `TurboEsmModel.set_turbo`.
        """
        options = {"add_pooling_layer": model.pooler is not None} if isinstance(model, EsmModel) else {}
        with torch.device("meta"):
            converted = cls(copy.deepcopy(model.config), **options)  # type: ignore[call-arg]
        for name, module in converted.named_modules():  # type: ignore[attr-defined]
            source = model.get_submodule(name)
            module._parameters.update(source._parameters)
            module._buffers.update(source._buffers)
            module.training = source.training
        converted.set_turbo(**turbo)  # type: ignore[attr-defined]
        return converted

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        calibration: str | os.PathLike[str] | Calibration | Literal[False] | None = None,
        preset: str | TurboConfig = DEFAULT_PRESET,
        backend: str | Backend = Backend.AUTO,
        **kwargs: Any,
    ) -> Self:
        """Load any ESM-2 checkpoint as Hugging Face's class does.

        Args:
            pretrained_model_name_or_path: a hub id or a folder.
            calibration: a `Calibration` or its path; by default the one in the folder, if there is one; False for none.
            preset: a preset's name or options: how new caches are stored.
            backend: implementation of the packed attention, see `Backend`.
            *args: as in `PreTrainedModel.from_pretrained`.
            **kwargs: as in `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint is not ESM-2, its weights are not finite, the calibration is another model's,
                or an option is wrong.
            OSError: there is no such checkpoint, or the hub cannot be reached.
        """
        check_is_esm2(pretrained_model_name_or_path, kwargs)
        # Hugging Face renames these keys for its own classes only.
        kwargs.setdefault("key_mapping", {_PUBLISHED_INV_FREQ: _INV_FREQ})
        wants_report = kwargs.pop("output_loading_info", False)
        try:
            loaded, report = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{pretrained_model_name_or_path}: pytorch_model.bin is damaged, or contains code, which is not"
                f" executed; if you trust its source, convert it: {_CONVERT}"
            ) from error
        except (SafetensorError, EOFError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).partition(". ")[0]
            raise ValueError(
                f"{pretrained_model_name_or_path}: the weights are damaged or do not fit config.json ({reason})"
            ) from error
        in_folder = os.path.join(pretrained_model_name_or_path, CALIBRATION_FILE)
        if calibration is None and os.path.isfile(in_folder):
            calibration = in_folder
        # Hugging Face fills missing weights with random ones. Heads and the pooler may be missing; rotary frequencies
        # follow from the configuration.
        keys = (key for key in report["missing_keys"] if not key.endswith(_INV_FREQ))
        missing = sorted(key for key in keys if "encoder.layer." in key or "embeddings." in key)
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path}: the checkpoint lacks {len(missing)} weights of the encoder, such as"
                f" {missing[0]}; is it ESM-2, and complete?"
            )
        mark_missing_heads(loaded.config, report["missing_keys"])
        check_weights(loaded)
        loaded.set_turbo(calibration=calibration or None, preset=preset, backend=backend)
        return (loaded, report) if wants_report else loaded  # type: ignore[return-value]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save as Hugging Face's class does, with the rotary frequencies in float32 under the published keys."""
        state = dict(kwargs.pop("state_dict", None) or self.state_dict())  # type: ignore[attr-defined]
        for name in [name for name in state if name.endswith(_INV_FREQ)]:
            prefix, inv_freq = name.removesuffix(_INV_FREQ), state.pop(name)
            for index in range(self.config.num_hidden_layers):
                state[f"{prefix}encoder.layer.{index}.attention.self.{_INV_FREQ}"] = inv_freq.clone()
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, state_dict=state, **kwargs)  # type: ignore[misc]


def check_is_esm2(name_or_path: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Check that a checkpoint is ESM-2 before anything is loaded.

    Raises:
        ValueError: it is another architecture, or its configuration is not valid or lacks a field that decides results.
        OSError: there is no such checkpoint, or the hub cannot be reached.
    """
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    config, _ = PreTrainedConfig.get_config_dict(
        name_or_path, **{name: options[name] for name in names if name in options}
    )
    if not config:
        raise OSError(f"{name_or_path}: there is no config.json")
    kind = config.get("model_type")
    if kind != "esm":
        raise ValueError(f"{name_or_path}: not ESM-2 but model type {kind!r}")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "rotary":
        raise ValueError(f"{name_or_path}: not ESM-2 but an ESM model with {positions} positions (ESM-1?)")
    for name, kind in _DECIDING.items():
        if type(config.get(name)) not in kind:
            problem = f"has {name} {config[name]!r}" if name in config else f"lacks {name}"
            raise ValueError(
                f"{name_or_path}: config.json {problem}, on which results depend; copy it again from the checkpoint"
            )
    try:
        EsmConfig.from_dict(config)
    # Errors of many types, some of which are no ValueErrors.
    except Exception as error:
        reason = " ".join(str(error).rpartition("Error: ")[2].split())
        raise ValueError(f"{name_or_path}: config.json is not valid ({reason}); copy it again") from error


def check_config(config: EsmConfig) -> None:
    """Check that a configuration is that of an ESM-2 encoder.

    Raises:
        ValueError: it has other positions, or is a decoder or a folding model.
    """
    if config.position_embedding_type != "rotary" or config.is_decoder or config.is_folding_model:
        raise ValueError("TurboEsm needs an ESM-2 encoder: rotary positions, no decoder, no folding trunk")


def check_weights(model: nn.Module) -> None:
    """Check that all weights are finite.

    Raises:
        ValueError: naming the first parameter that holds NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach().sum(dtype=torch.float32)):
            raise ValueError(f"the weights are damaged: {name} holds NaN or infinity")
