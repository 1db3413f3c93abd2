"""Loading and saving of checkpoints, and checks of what they hold."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from esm_turbo.calibration import Calibration
from esm_turbo.config import Backend, TurboConfig
from esm_turbo.files.families import Family, encoder_of, family_of
from esm_turbo.files.forward_code import is_recorder
from esm_turbo.files.kinds import CALIBRATION_FILE
from esm_turbo.files.model_contents import changed_values, is_inside
from esm_turbo.model.adapters import is_adapter
from esm_turbo.model.heads import check_untrained, mark_missing_heads
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.model.plain import check_same_outputs, is_replaced
from esm_turbo.model.spread import STRATEGIES, finalize_dispatch, needs_accelerate, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file;'
    " state = torch.load('pytorch_model.bin', map_location='cpu', weights_only=False);"
    " save_file({k: v.clone() for k, v in state.items()}, 'model.safetensors', metadata={'format': 'pt'})\""
)
# While it loads a model, transformers changes the default dtype and how weights are tied, for the whole process.
_LOADING = threading.RLock()
# Names of dtypes in safetensors files.
_SAME_SIZE = ({"BF16", "F16", "I16", "U16"}, {"F32", "I32", "U32"})


# Far beyond every published model, but for tokens, of which caches store one byte. Of positions, Hugging Face's ESM-2
# makes a table, although rotary ones need none.
_MOST = {"max_position_embeddings": 2**20, "vocab_size": 2**8}
_MOST_NUMBERS = 2**17


class PicklableHooksMixin:
    """Pickles and copies a module without what transformers installs to record hidden states, which is not picklable.

    The next forward that needs it installs it again, see `record_outputs`.
    """

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_output_capturing_hooks_installed", None)
        hooks = state["_forward_hooks"]
        state["_forward_hooks"] = type(hooks)((key, hook) for key, hook in hooks.items() if not is_recorder(hook))
        return state


class CheckpointMixin(PicklableHooksMixin):
    """Makes, loads and saves models of all families and classes.

    Attributes:
        family: the model's.
        deciding_fields: fields of config.json that decide results, with their types; none may be missing.
        key_mapping: weights of older checkpoints by regular expression, see `PreTrainedModel.from_pretrained`.
    """

    family: ClassVar[Family]
    deciding_fields: ClassVar[Mapping[str, tuple[type, ...]]]
    key_mapping: ClassVar[Mapping[str, str]] = {}
    config: PreTrainedConfig

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _let_record(type(self), self.config)

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any], source: object) -> None:
        """Check what a config.json says, beyond `deciding_fields`, before anything is loaded.

        Raises:
            ValueError: it is not the family's.
        """

    @classmethod
    def check_config(cls, config: PreTrainedConfig) -> None:
        """Check that a configuration is that of an encoder of the family.

        Raises:
            ValueError: it is another architecture's, or a value is not as it must be.
        """
        if config.model_type != cls.family.model_type:
            raise ValueError(f"{cls.__name__} needs a model of {cls.family.name}, got model type {config.model_type!r}")
        # A damaged number would otherwise take all memory before weights are found not to fit.
        for name in [*(name for name, kinds in cls.deciding_fields.items() if kinds == (int,)), *_MOST]:
            value, most = getattr(config, name, None), _MOST.get(name, _MOST_NUMBERS)
            if isinstance(value, int) and value > most:
                raise ValueError(f"`{name}` must be at most {most:,}, got {value:,}")
        if getattr(config, "is_causal", None):
            raise ValueError("`is_causal` must not be set: an encoder's tokens attend to what follows, too")
        check_untrained(config)

    @classmethod
    def from_esm(cls, model: PreTrainedModel, *, model_id: str | None = None, **turbo: Any) -> Self:
        """Convert the library's model of the same kind, which stays unchanged; both share their weights.

        Args:
            model: an encoder, or one with a language-model head.
            model_id: see `CachedModel.model_id`.
            **turbo: as in `CachedModel.set_turbo`.

        Raises:
            ValueError: the model computes something else than its class does with its configuration and weights (in
                evaluation mode, outputs are compared), these are offloaded to the CPU or a disk, or an option is wrong.
        """
        cls.check_config(model.config)
        with torch.device("meta"):
            converted = cls(copy.deepcopy(model.config), **cls.options_of(model))  # type: ignore[call-arg]
        for name, module in converted.named_modules():  # type: ignore[attr-defined]
            source = _as_made(model, name, module)
            module._parameters.update(source._parameters)
            module._buffers.update(source._buffers)
            module.training = source.training
        finalize_dispatch(converted)
        converted.model_id = model_id  # type: ignore[attr-defined]
        converted.set_turbo(**turbo)  # type: ignore[attr-defined]
        check_same_outputs(model.base_model, converted.base_model)  # type: ignore[attr-defined]
        return converted

    @classmethod
    def options_of(cls, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments of the class, besides the configuration, with which a model was made."""
        return {}

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        calibration: str | os.PathLike[str] | Calibration | Literal[False] | None = None,
        preset: str | TurboConfig | None = None,
        backend: str | Backend = Backend.AUTO,
        model_id: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load any checkpoint of the family as the library's class does.

        Args:
            pretrained_model_name_or_path: a hub id or a folder.
            calibration: a `Calibration` or its path; by default the one in the folder, if there is one; False for none.
            preset: a preset's name or options: how new caches are stored; None is `turbo3`.
            backend: implementation of the packed attention, see `Backend`.
            model_id: see `CachedModel.model_id`.
            *args: as in `PreTrainedModel.from_pretrained`.
            **kwargs: as in `PreTrainedModel.from_pretrained`. A `device_map` spreads layers over devices, see
                `model.spread`.

        Raises:
            ValueError: the checkpoint is not the family's, its weights are not finite, the calibration is another
                model's, or an option is wrong.
            ImportError: there is a `device_map`, and accelerate is missing.
            OSError: there is no such checkpoint, or the hub cannot be reached.
        """
        cls.check_checkpoint(pretrained_model_name_or_path, kwargs)
        # The library renames these keys for its own classes only.
        kwargs.setdefault("key_mapping", dict(cls.key_mapping))
        wants_report = kwargs.pop("output_loading_info", False)
        cls._plan_devices(pretrained_model_name_or_path, kwargs)
        try:
            with _LOADING:
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
        # The library fills missing weights with random ones. Heads and the pooler may be missing; rotary frequencies
        # follow from the configuration.
        encoder, prefix = encoder_of(loaded), f"{cls.family.attribute}."
        needed = {name for name, _ in encoder.named_parameters() if is_inside(name)}
        # By `ignore_mismatched_sizes`, also those of another shape.
        drawn = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
        missing = sorted(key for key in drawn if key.removeprefix(prefix) in needed)
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path}: the checkpoint lacks {len(missing)} weights of the encoder, such as"
                f" {missing[0]}; is it {cls.family.name}, and complete?"
            )
        found = (re.search(rf"\b{cls.family.layers}\.(\d+)\.", key) for key in report["unexpected_keys"])
        if more := {int(match[1]) for match in found if match} - {*range(loaded.config.num_hidden_layers)}:
            raise ValueError(
                f"{pretrained_model_name_or_path}: config.json has num_hidden_layers"
                f" {loaded.config.num_hidden_layers}, but the checkpoint has layer {max(more) + 1}, too; copy it again"
                " from the checkpoint"
            )
        mark_missing_heads(loaded.config, drawn)
        finalize_dispatch(loaded)
        check_weights(loaded)
        unwritten = (key for key, x in encoder.named_parameters() if key in needed and x.dim() > 1 and not x.any())
        if (name := next(unwritten, None)) is not None:
            raise ValueError(f"the weights are damaged: {name} is all zeros, as in a file that was not written whole")
        check_stored_dtypes(pretrained_model_name_or_path)
        loaded.model_id = model_id
        loaded.set_turbo(calibration=calibration or None, preset=preset, backend=backend)
        return (loaded, report) if wants_report else loaded  # type: ignore[return-value]

    @classmethod
    def _plan_devices(cls, name_or_path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        """Replace a strategy or a map among the options by a map of all layers; the name of one device is left."""
        given = options.get("device_map")
        if not isinstance(given, Mapping) and given not in STRATEGIES:
            return
        needs_accelerate()
        config = cls.config_class.from_dict(read_config(name_or_path, options))  # type: ignore[attr-defined]
        with torch.device("meta"):
            model = cls(config)  # type: ignore[call-arg]
        dtype = options.get("dtype")
        dtype = getattr(torch, dtype, config.dtype) if isinstance(dtype, str) else dtype
        options["device_map"] = plan(model, given, options.pop("max_memory", None), dtype or torch.float32)  # type: ignore[arg-type]

    @classmethod
    def check_checkpoint(cls, name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        """Check that a checkpoint is the family's before anything is loaded.

        Args:
            name_or_path: a hub id or a folder.
            options: of `from_pretrained`.

        Raises:
            ValueError: it is another architecture, or its configuration is not valid or lacks a field that decides
                results.
            OSError: there is no such checkpoint, or the hub cannot be reached.
        """
        fields = read_config(name_or_path, options)
        kind = fields.get("model_type")
        if kind != cls.family.model_type:
            raise ValueError(f"{name_or_path}: not {cls.family.name} but model type {kind!r}")
        cls.check_fields(fields, name_or_path)
        for name, kinds in cls.deciding_fields.items():
            if type(fields.get(name)) not in kinds:
                problem = f"has {name} {fields[name]!r}" if name in fields else f"lacks {name}"
                raise ValueError(
                    f"{name_or_path}: config.json {problem}, on which results depend; copy it again from the checkpoint"
                )
        _check_num_layers(name_or_path, fields)
        try:
            cls.config_class.from_dict(fields)  # type: ignore[attr-defined]
        # Errors of many types, some of which are no ValueErrors.
        except Exception as error:
            reason = " ".join(str(error).rpartition("Error: ")[2].split())
            raise ValueError(
                f"{name_or_path}: config.json is not valid ({reason}); copy it again from the checkpoint"
            ) from error

    def state_to_save(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state as it stands in published checkpoints."""
        return state

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save as the library's class does, under the keys of published checkpoints.

        Raises:
            ValueError: the folder holds an adapter, which loading would merge into the saved weights.
        """
        # transformers saves an adapter that it has added as such.
        if is_adapter(save_directory) and not getattr(self, "_hf_peft_config_loaded", False):
            raise ValueError(f"{save_directory}: holds an adapter, which would be loaded again; save to another folder")
        state = dict(kwargs.pop("state_dict", None) or self.state_dict())  # type: ignore[attr-defined]
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, state_dict=self.state_to_save(state), **kwargs)  # type: ignore[misc]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def record_outputs(encoder: Any) -> None:
    """Have transformers record outputs of all layers, also where some were put back from copies, which lack that."""
    given = (getattr(encoder, "_can_record_outputs", None) or {}).values()
    recorded = itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in given)
    kinds = tuple({getattr(one, "target_class", one) for one in recorded})
    with _RECORDING:
        layers = [one for one in encoder.modules() if isinstance(one, kinds)]
        recorders = [[key for key, hook in one._forward_hooks.items() if is_recorder(hook)] for one in layers]
        complete = all(len(keys) == 1 for keys in recorders)
        for one, keys in () if complete else zip(layers, recorders, strict=True):
            for key in keys:
                del one._forward_hooks[key]
        # The library asks for this name, and installs what is missing, before a forward that records.
        encoder._output_capturing_hooks_installed = complete
        if not complete:
            maybe_install_capturing_hooks(encoder)


_RECORDING = threading.Lock()
_RECORDED = set[type[CheckpointMixin]]()


def _let_record(kind: type[CheckpointMixin], config: PreTrainedConfig) -> None:
    """Let transformers record the hidden states of models of a class, also in a process that has unpickled them only.

    It does so for classes of which it has made a model, and else returns none without an error.
    """
    if kind not in _RECORDED:
        with torch.device("meta"):
            kind(copy.deepcopy(config))  # type: ignore[call-arg]
        _RECORDED.add(kind)


def _check_num_layers(folder: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Check that the weights in a folder can be those of so many layers, which would take long to build.

    Raises:
        ValueError: there are fewer weights than layers.
    """
    names, files = set[str](), sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except SafetensorError:
            # Loading it says what is wrong.
            return
    layers = fields.get("num_hidden_layers")
    if files and isinstance(layers, int) and layers > len(names):
        raise ValueError(
            f"{folder}: config.json has num_hidden_layers {layers}, but the checkpoint only {len(names)} weights; copy"
            " it again from the checkpoint"
        )


def read_config(name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint's config.json.

    Args:
        name_or_path: a hub id or a folder.
        options: of `from_pretrained`; those that do not tell where the file is are ignored.

    Raises:
        OSError: there is no such checkpoint, or the hub cannot be reached.
    """
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    fields: dict[str, Any]
    fields, _ = PreTrainedConfig.get_config_dict(
        name_or_path, **{name: options[name] for name in names if name in options}
    )
    if not fields:
        raise OSError(f"{name_or_path}: there is no config.json")
    return fields


def checkpoint_class(name_or_path: str | os.PathLike[str], options: Mapping[str, Any], *, head: bool = True) -> Any:
    """The class of this package that loads a checkpoint: of its family, with a language-model head or without.

    Raises:
        ValueError: it is of no supported family, or the installed transformers lacks the family.
        OSError: there is no such checkpoint, or the hub cannot be reached.
    """
    family = family_of(read_config(name_or_path, options).get("model_type"), name_or_path)
    return family.load(family.masked_lm if head else family.model)


def check_stored_dtypes(folder: str | os.PathLike[str]) -> None:
    """Check that the weights in a folder have one dtype of each size: others come from a damaged header.

    Nothing else would notice: of the same bytes, another dtype makes other numbers.

    Raises:
        ValueError: naming the file and the dtypes.
    """
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not a mapping
        for alike in _SAME_SIZE:
            if len(both := sorted(found & alike)) > 1:
                dtypes = " and ".join(both)
                raise ValueError(f"{path}: has weights in {dtypes}, its header is damaged; copy it again")


def check_weights(model: nn.Module) -> None:
    """Check that all weights are finite.

    Raises:
        ValueError: naming the first parameter that holds NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach().sum(dtype=torch.float32)):
            raise ValueError(f"the weights are damaged: {name} holds NaN or infinity")


def _as_made(model: nn.Module, name: str, made: nn.Module) -> nn.Module:
    """The submodule of a model, which computes what the one that was made by its configuration does with its weights.

    Raises:
        ValueError: there is none, or it computes something else.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} does not fit its configuration: {error}") from error
    # torch.compile wraps a module, and accelerate a forward.
    module = getattr(module, "_orig_mod", module)
    state = vars(module)
    forward = state.get("_original_forward", state.get("_old_forward", state.get("forward")))
    is_own = forward is None or getattr(forward, "__func__", None) in _wrapped(type(module).forward)
    kinds = [one for one in type(module).__mro__ if ".models." in one.__module__]
    methods = [key for key in state if key != "forward" and any(callable(vars(one).get(key)) for one in kinds)]
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    options, attention = changed_values(module, made), getattr(model.config, "_attn_implementation", None)
    if _overrides(type(module), made):
        what = f"is a {type(module).__name__}"
    elif not all(map(is_replaced, hooks)) or not _is_of_accelerate(state.get("_hf_hook")):
        what = "has hooks"
    elif not is_own or methods:
        what = f"has a {min(methods, default='forward')} of its own"
    elif isinstance(made, nn.ModuleList) and len(made) != len(module):  # type: ignore[arg-type]
        what = f"has {len(module)} modules, not {len(made)}"  # type: ignore[arg-type]
    elif options:
        what = f"has another {options[0]}"
    elif getattr(state.get("config"), "_attn_implementation", attention) != attention:
        what = "has another attention implementation"
    else:
        return module
    raise ValueError(
        f"{name or type(model).__name__} {what}: of a model that is converted or calibrated, only weights are taken"
    )


def _wrapped(function: Any) -> list[Any]:
    """A function, and what decorators hide in it: accelerate takes them off."""
    inner = getattr(function, "__wrapped__", None)
    return [function, *(() if inner is None else _wrapped(inner))]


def _overrides(kind: type[nn.Module], made: nn.Module) -> bool:
    """True if a class, or one of those that it adds to the other module's, defines anew what that has."""
    added = itertools.takewhile(lambda one: not isinstance(made, one), kind.__mro__)
    named = [item for one in added for item in vars(one).items() if item[0] == "__call__" or item[0][:2] != "__"]
    return any(hasattr(made, name) and value is not getattr(type(made), name, None) for name, value in named)


def _is_of_accelerate(hook: Any) -> bool:
    """True for no hook, and for those that only move tensors between devices."""
    known = hook is None or type(hook).__module__ == "accelerate.hooks"
    return known and all(map(_is_of_accelerate, getattr(hook, "hooks", ())))
