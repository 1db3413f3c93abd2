"""`TurboEsm`, the entry point.

The modelling code is imported when a model is loaded, which keeps the import of this module fast.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from esm_turbo import binders
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import Backend, TurboConfig
from esm_turbo.context_model import ContextModel, ExtendOutput
from esm_turbo.evaluate import run
from esm_turbo.files.hub import ModelNotFoundError, full_name, local_files_only, not_found, without_loading_bar
from esm_turbo.files.kinds import CALIBRATION_FILE
from esm_turbo.tasks.embedding import embed as embedding
from esm_turbo.tasks.generation import generate as generation
from esm_turbo.tasks.scoring import pairs
from esm_turbo.tasks.variants import many

if TYPE_CHECKING:
    from esm_turbo.calibration import Calibration
    from esm_turbo.model.precision import Precision
    from esm_turbo.parallel.workers import Devices
    from esm_turbo.tasks.common.pieces import Runner

_log = logging.getLogger(__name__)

__all__ = ["ExtendOutput", "ModelNotFoundError", "TurboEsm"]


class TurboEsm(ContextModel):
    """ESM-2, ESM-C or E1 with a compressed key/value cache: a `ContextModel` with loading, and a method per task."""

    embed = embedding.embed
    """Embed proteins as `esm-extract` does, see `tasks.embedding.embed.embed`."""

    score = pairs.score
    """Score candidates as continuations of a target, see `tasks.scoring.pairs.score`."""

    score_pairs = pairs.score_pairs
    """Score candidates on many targets, see `tasks.scoring.pairs.score_pairs`."""

    score_variants = many.score_variants
    """Score variants of a protein, see `tasks.variants.many.score_variants`."""

    score_many_variants = many.score_many_variants
    """Score substitutions in many proteins, see `tasks.variants.many.score_many_variants`."""

    generate_binders = binders.generate_binders
    """Generate peptides for a target by the recipe of PepMLM, see `binders.generate_binders`."""

    generate = generation.generate
    """Generate residues, see `tasks.generation.generate.generate`."""

    evaluate = run.evaluate
    """Measure the accuracy and memory of presets on proteins, see `evaluate.evaluate`."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        calibration: str | os.PathLike[str] | Calibration | Literal[False] | None = None,
        preset: str | TurboConfig | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        precision: Precision | None = None,
        backend: str | Backend = Backend.AUTO,
        device_map: str | Mapping[str, int | str | torch.device] | None = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        model_id: str | None = None,
    ) -> Self:
        """Load a model with its tokenizer and calibration.

        Args:
            model: a hub id or a folder of any ESM-2, ESM-C or E1 checkpoint, the name of one of Meta's such as
                `esm2_t33_650M_UR50D`, or the folder of a LoRA adapter; None is the embedded esm2-mini, which needs no
                network and ships with its calibration.
            calibration: a `Calibration`, its path, or "auto": calibrate on the shipped proteins once and keep the
                result in the user's cache folder. None uses the calibration in the model's folder if there is one.
                False uses none; then only the preset `exact` can write caches.
            preset: the storage format of caches. None is `turbo3`; without a calibration, `score`, `score_variants` and
                `generate_binders` then keep contexts at full precision; one that is named is used or refused.
            device: None is CUDA if available, else MPS, else the CPU.
            dtype: None is float32 on CPU and MPS, and the checkpoint's dtype on CUDA.
            precision: of the products of layers, for ESM-2 and ESM-C. None is the dtype; "fp8" is e4m3 with a scale for
                each token and output, in a model of bfloat16, on an NVIDIA GPU of compute capability 9.0 or newer. It
                is part of the model's identity: contexts of one precision are refused by the other. Products that the
                calibration found sensitive (`esm-turbo calibrate --precision fp8`) stay in bfloat16.
            backend: implementation of the packed attention, see `Backend`.
            device_map: spreads the layers of a model that is larger than a device; in place of `device`. "auto" or
                "balanced" shares them out, "balanced_low_0" leaves room on the first device, and "sequential" fills one
                after the other; or devices by module, such as `{"esm.embeddings": 0, "esm.encoder.layer.0": 0, ...}`.
                Everything but the layers lies with the embeddings, where outputs are. Needs accelerate.
            max_memory: bytes that weights may take by device, such as `{0: "60GiB", 1: "60GiB"}`; for a `device_map`
                that is shared out.
            model_id: a name for the code that you add to the model afterwards, such as hooks. Contexts and embeddings
                of unknown code cannot be kept in a file without one, and are refused by models of another name.

        Raises:
            ValueError: the checkpoint is none of these, its weights are not finite, the calibration is
                unreadable or belongs to another model, an option is invalid, the device cannot be used, or the model
                does not fit on the devices of `device_map`.
            ImportError: accelerate is missing, which `device_map` needs.
            ModelNotFoundError: (an OSError) the model does not exist, or the hub cannot be reached.
        """
        from esm_turbo.model.adapters import base_of, is_adapter, merge_adapter
        from esm_turbo.model.checkpoints import checkpoint_class
        from esm_turbo.model.precision import check_precision, quantize_products
        from esm_turbo.model.spread import STRATEGIES

        if model is None:
            _mention_demonstration()
        source = full_name(os.fspath(EMBEDDED_MODEL if model is None else model))
        adapter = Path(source) if is_adapter(source) else None
        where: dict[str, Any] = {}
        if adapter is not None:
            base, where = base_of(adapter)
            source = full_name(base)
        if preset is not None:
            TurboConfig.from_preset(preset)
        if device_map is not None and device is not None:
            raise ValueError("`device` and `device_map` both say where the model lies: give one of them")
        if device_map is None and max_memory is not None:
            raise ValueError("`max_memory` needs a `device_map`, such as 'auto'")
        if isinstance(device_map, str) and device_map not in STRATEGIES:
            raise ValueError(
                f"`device_map` must be {', '.join(STRATEGIES)}, or a mapping of modules to devices, got"
                f" {device_map!r}; for one device give `device`"
            )
        device = _usable(device or _best_device())
        if precision is not None:
            check_precision(precision, device, dtype, spread=device_map is not None)
            dtype = torch.bfloat16
        options: dict[str, Any] = {"dtype": dtype or ("auto" if device.type == "cuda" else torch.float32)}
        if device_map is not None:
            options |= {"device_map": device_map, "max_memory": max_memory}
        where["local_files_only"] = local_files_only(source)
        try:
            model_class = checkpoint_class(source, where)
            with without_loading_bar():
                # The calibration is compared below, with the weights as they are then.
                loaded = model_class.from_pretrained(source, calibration=False, model_id=model_id, **where, **options)
        except OSError as error:
            raise not_found(source) from error
        try:
            tokenizer = model_class.family.load_tokenizer().from_pretrained(source, **where)
        # The tokenizer raises a TypeError if its vocabulary file is missing.
        except (OSError, TypeError) as error:
            raise not_found(source) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source}: {model_class.family.vocabulary_file} is damaged: it is not text; copy it again from the"
                " checkpoint"
            ) from error
        if adapter is not None:
            merge_adapter(loaded, adapter)
        if calibration is None and (in_folder := Path(adapter or source) / CALIBRATION_FILE).is_file():
            calibration = in_folder
        if device_map is None:
            loaded = loaded.to(device)
        turbo = cls(loaded, tokenizer)
        if calibration == "auto":
            from esm_turbo.evaluate.calibrated import measure_calibration
            from esm_turbo.tasks.calibration.auto import auto_calibration

            calibration = auto_calibration(turbo, measure=measure_calibration)
        loaded.set_turbo(calibration=calibration or None, preset=preset, backend=backend)
        if precision is not None:
            quantize_products(loaded)
            loaded.requires_grad_(False)
        return turbo

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write model, tokenizer and calibration to a folder, from which `from_pretrained` restores them.

        Without a calibration, one that the folder holds is removed: it was another model's.

        Raises:
            ValueError: the folder holds an adapter, which loading would merge into the saved weights, or the model has
                one of `add_adapter`, of which transformers writes nothing else.
        """
        if getattr(self.model, "_hf_peft_config_loaded", False):
            raise ValueError(
                "of a model with an adapter (`add_adapter`), transformers writes the adapter alone: write that by"
                " `model.save_pretrained`, and the model before it is added"
            )
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        path = Path(folder) / CALIBRATION_FILE
        if self.calibration is None:
            path.unlink(missing_ok=True)
        else:
            self.calibration.save(path)

    def warmup(self) -> int:
        """Compile the GPU kernels that calls need, ahead of the first call; see `TurboEsmModel.warmup`."""
        count: int = self.model.base_model.warmup()
        return count

    def runner(self, devices: Devices | None) -> Runner | None:
        """Processes with copies of this model, which start when they have something to do; None for this process.

        Args:
            devices: as for `score_pairs`.
        """
        if devices is None:
            return None
        from esm_turbo.parallel.workers import DeviceRunner, Workers

        return devices if isinstance(devices, Workers) else DeviceRunner(self, devices)


@functools.cache
def _mention_demonstration() -> None:
    """Say once per process that nobody has named a model."""
    _log.warning(
        "%s is a small demonstration model, not one of Meta's; for real work name a checkpoint of ESM-2, ESM-C or E1,"
        " such as TurboEsm.from_pretrained('facebook/esm2_t33_650M_UR50D')",
        EMBEDDED_MODEL.name,
    )


def _usable(name: str | torch.device) -> torch.device:
    """The device of that name; a ValueError if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # A torch build without support for a device type raises an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Some of torch's messages span pages.
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(
            f"device {str(name)!r} cannot be used here: {reason}; use 'cpu', or another machine or torch build"
        ) from None
    return device


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
