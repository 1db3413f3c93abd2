"""Plain modules: those whose computation may be replaced by fused kernels or a captured graph."""

from __future__ import annotations

import contextlib
import copy
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from itertools import chain, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from esm_turbo.files.forward_code import changes_no_number, has_global_hooks, is_known
from esm_turbo.files.identity import agree
from esm_turbo.files.model_contents import dropping_module, held_tensors, is_moved_by_forwards, refuse_packed
from esm_turbo.model.memory import is_out_of_memory
from esm_turbo.model.spread import ToWeights

# With any weights.
_TOKENWISE = {
    nn.Dropout,
    nn.Embedding,
    nn.GELU,
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleDict,
    nn.ModuleList,
    nn.RMSNorm,
    nn.Sequential,
    nn.Sigmoid,
    nn.SiLU,
}
# Attention of the library's aside.
_FAMILIES = ("esm_turbo.", "transformers.activations", "transformers.models.esm.", "transformers.models.esmc.")
# What torch.compile wraps has that of the module within.
_TRAINING = operator.methodcaller("get", "training")
_STANCE = threading.RLock()
_HOOKS = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")
_Module = TypeVar("_Module", bound=nn.Module)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Within the block, what torch.compile has wrapped is not compiled, and no gradients are recorded."""
    # The stance is that of all threads: two that overlap would leave it to them for good.
    with _STANCE, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def unmoved(module: nn.Module) -> Iterator[None]:
    """Within the block, forwards change copies of what they would change in a module, see `is_moved_by_forwards`.

    For one thread at a time, as within `eagerly`.
    """
    moved = [one for one in module.modules() if is_moved_by_forwards([one])]
    groups: list[MutableMapping[str, Any]] = [group for one in moved for group in (one._parameters, one._buffers)]
    kept = [(group, dict(group)) for group in groups]
    for group in groups:
        group.update(copy.deepcopy(dict(group)))
    try:
        yield
    finally:
        for group, tensors in kept:
            group.update(tensors)


def holds_in_float32(module: _Module, holds: Callable[[_Module], bool]) -> bool:
    """Tell whether something holds for a module, and for a copy of it in float32, whose rounding hides less.

    Args:
        module: of any dtype; it is left as it is.
        holds: called for both, since a hook may know its modules from their copies, or for the module if that is in
            float32; without autocast, and with what `eagerly` says.

    Raises:
        ValueError: a call fails, such as a function that holds tensors of another dtype.
    """
    try:
        with eagerly(), torch.autocast(next(module.parameters()).device.type, enabled=False), unmoved(module):
            wide = _wide_copy(module)
            return holds(module) and (wide is module or holds(wide))
    except (RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            "the model has modules or code of its own, and was to be compared in float32, in which it does not run"
            f" ({error}): use it in float32, or without contexts"
        ) from error


def _wide_copy(module: _Module) -> _Module:
    half = [one for _, one in held_tensors(module.named_modules()) if one.dtype in (torch.bfloat16, torch.float16)]
    if not half:
        return module
    # What a copy takes for the tensors of the original.
    wide: dict[int, Any] = {id(one): one.float() for one in half}
    wide |= {id(one): nn.Parameter(wide[id(one)]) for one in half if isinstance(one, nn.Parameter)}
    copied = copy.deepcopy(module, wide)
    for one in copied.modules():
        # What `compile` put there is a function of the original.
        one.__dict__.pop("_compiled_call_impl", None)
    return copied


def plain_addresses(module: nn.Module, allowed: Collection[type[nn.Module]]) -> tuple[int, ...] | None:
    """Addresses of all parameters and buffers of a plain module, which tell whether they were replaced; else None."""
    tree = tree_of(module)
    held = tree.held()
    return addresses_of(held) if not has_global_hooks() and tree.is_plain(allowed, held) else None


def is_plain(module: nn.Module, allowed: Collection[type[nn.Module]]) -> bool:
    """Tell whether the computation of a module may be replaced.

    Its submodules are then all of an allowed class, unhooked and with their class's own forward, and its weights are
    contiguous, as kernels assume.

    Adapters replace modules or their forward, or hook into them; offloaded layers do, too. A call takes some 0.1 ms for
    33 layers, as it does not walk the tree again while it stays the same, and its loops run in C.
    """
    tree = tree_of(module)
    return not has_global_hooks() and tree.is_plain(allowed, tree.held())


def addresses_of(held: Iterable[Tensor]) -> tuple[int, ...]:
    """Addresses of tensors."""
    return tuple(map(Tensor.data_ptr, held))


def tree_of(module: nn.Module) -> _Tree:
    """The submodules of a module, listed once while they stay the same."""
    # Kept by the module: the tree refers to it, so that a dictionary of modules, even a weak one, would never let go.
    tree: _Tree | None = module.__dict__.get("_tree")
    if tree is None or tree.changed(module):
        tree = module.__dict__["_tree"] = _Tree(module)
    return tree


class _Tree:
    """The submodules of a module, and the dictionaries of what may change in them."""

    def __init__(self, module: nn.Module) -> None:
        submodules = list(module.modules())[1:]
        states = [module.__dict__, *(submodule.__dict__ for submodule in submodules)]
        self.states = states
        self.children = [state["_modules"] for state in states if state["_modules"]]
        # Some libraries put other dictionaries in place of a module's: these are looked up in every call.
        self.holders = [(state, name) for state in states for name in ("_parameters", "_buffers") if state[name]]
        self.root = type(module)
        self.submodules = submodules
        self.known = self._listed()

    # Copies of a module have trees of their own.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def _listed(self) -> list[Any]:
        return list(chain.from_iterable([children.values() for children in self.children]))

    def changed(self, module: nn.Module) -> bool:
        """Tell whether a submodule was replaced, added or removed, or the tree is that of a module copied from."""
        return self.states[0] is not module.__dict__ or self._listed() != self.known

    def is_plain(self, allowed: Collection[type[nn.Module]], held: Iterable[Tensor]) -> bool:
        hooks = filter(None, chain.from_iterable(map(_HOOKS, self.states)))
        return (
            {self.root, *map(type, self.submodules)} <= set(allowed)
            and not any(map(operator.contains, self.states, repeat("forward")))
            and all(map(is_replaced, chain.from_iterable(own.values() for own in hooks)))
            and all(map(Tensor.is_contiguous, held))
        )

    def held(self) -> list[Tensor]:
        """All parameters and buffers."""
        held = chain.from_iterable([state[name].values() for state, name in self.holders])
        return [x for x in held if x is not None]

    def modes(self) -> list[bool]:
        """Whether each module is in training mode."""
        return [*map(_TRAINING, self.states)]

    def epsilons(self) -> list[float | None]:
        """What norms add to variances; None for other modules."""
        return [state.get("eps") for state in self.states]


def is_replaced(hook: Any) -> bool:
    """Tell whether the packed encoder does what a hook does, or need not: it changes no number."""
    return type(hook) is ToWeights or changes_no_number(hook)


def check_attention(attention: type[nn.Module]) -> None:
    """Check that the library's attention was not replaced, which sessions attend in place of.

    Raises:
        ValueError: its class has a forward that is not the library's.
    """
    if not is_known(attention.forward):
        raise changed_attention(f"{attention.__qualname__}.forward was replaced")


def changed_attention(change: str) -> ValueError:
    """The error of an attention that sessions would ignore."""
    return ValueError(
        f"{change}, and contexts are read and written by an attention that would ignore it: use the model without"
        " contexts, such as by the arm 'full'"
    )


def is_unhooked(module: nn.Module) -> bool:
    """Tell whether a call of a module, submodules aside, runs a library's forward and nothing else."""
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    forwards = [vars(one)["forward"] for one in type(module).__mro__ if "forward" in vars(one)]
    own = "forward" in vars(module) or not all(map(is_known, forwards))
    return not own and not has_global_hooks() and all(map(is_replaced, hooks))


def is_tokenwise(module: nn.Module, suffix: str = "") -> bool:
    """Tell whether a module computes each token from itself with any weights, by its classes.

    Args:
        module: such as an encoder, whose attention reads contexts.
        suffix: of the names of those classes of the families that may be in it.
    """
    tree = tree_of(module)
    kinds = {type(module), *map(type, tree.submodules)}
    others = kinds - _TOKENWISE
    own = all(kind.__module__.startswith(_FAMILIES) and kind.__name__.endswith(suffix) for kind in others)
    return own and not has_global_hooks() and tree.is_plain(kinds, ())


def check_tokenwise(model: Any) -> None:
    """Check that the head of a language model computes each token from itself, since it is called for some of them.

    One of other modules is called for 12 made-up tokens, for each half of them, and for both as rows, also in float32.

    Args:
        model: such as `TurboEsmForMaskedLM`.

    Raises:
        ValueError: it does not, or as of `refuse_packed` and `holds_in_float32`.
    """
    head = model.lm_head
    if torch.compiler.is_compiling() or is_tokenwise(head, "LMHead") or dropping_module(head.named_modules()):
        return
    refuse_packed(head.named_modules())
    # So that no statistic over tokens is about that of a half.
    states = torch.randn(1, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    states[:, :6] *= 4
    if not holds_in_float32(head, lambda one: _is_tokenwise_on(one, states)):
        raise ValueError(
            f"{type(head).__name__}, the head of the model, computes tokens from each other, and would be called for"
            " some of them: call the model itself, without contexts"
        )


def _is_tokenwise_on(head: nn.Module, states: Tensor) -> bool:
    states = states.to(next(head.parameters()))
    halves = states.split(6, dim=1)
    expected, precision = head(states), str(states.dtype).removeprefix("torch.")
    alone = torch.cat([*map(head, halves)], dim=1)
    rows = head(torch.cat(halves)).reshape(expected.shape)
    return all(agree(expected, found, precision, bound=1e-4) for found in (alone, rows))


def check_same_outputs(source: Any, encoder: Any) -> None:
    """Check that an encoder gives what its weights give in the class to which they were converted.

    Args:
        source: the encoder that was converted.
        encoder: what it was converted to.

    Raises:
        ValueError: it does not, so that something was left out of which `from_esm` does not know.
    """
    # Nothing says that the layers of a model on several devices can be called.
    if encoder.is_spread or is_moved_by_forwards(chain(source.modules(), encoder.modules())):
        return
    if hasattr(source, "executor"):
        expected = source.executor.probe_states()
    else:
        ids, mask, _ = encoder.executor.probe_input()
        with eagerly():
            expected = source(ids, attention_mask=mask)[0][mask.bool()]
    found = encoder.executor.probe_states()
    # Both run the same functions, and so do not differ by rounding either.
    if not agree(expected, found, "float32"):
        raise ValueError(
            f"{type(source).__name__} computes something else than its weights do in its class: of a model that is"
            " converted or calibrated, only weights are taken"
        )


def check_unhooked(model: nn.Module, caller: str = "scores call its encoder and its head") -> None:
    """Check that calls of parts of a model run all that a call of the model would.

    Args:
        model: a model, or an encoder.
        caller: what calls which parts, for the error.

    Raises:
        ValueError: the model has hooks, or a forward, of its own, or there are hooks of all modules.
    """
    if not is_unhooked(model):
        raise ValueError(
            f"{type(model).__name__} has hooks or a forward of its own, or there are hooks of all modules, as a program"
            f" or a library such as accelerate puts there; {caller}, and would leave them out: put hooks on these, or"
            " call the model"
        )
