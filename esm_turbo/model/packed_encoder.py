"""ESM-2's encoder for inference in half precision on CUDA, on packed rows and with fused operations.

Hugging Face's forward pads every row, and spends more time in unfused operations between matrix products than in the
products. Here rows are packed along one dimension without padding (Dao 2023); queries, keys and values are one product;
residual sums are fused with the layer norm that follows; rotation and activation run in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esm_turbo.codecs.transfers import to_device
from esm_turbo.model.projections import fuse_linears
from esm_turbo.model.sessions import Extension, KVSession
from esm_turbo.model.spread import ToWeights, beside

DTYPES = (torch.bfloat16, torch.float16)
_HOOKS = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a padded batch lie when its rows are packed one after the other.

    Attributes:
        batch_size: rows.
        width: columns of the padded batch.
        longest: tokens of the longest row.
        positions: of every token in its row, int32 [T].
        offsets: of every row's first token, and T, int32 [rows + 1].
        index: of every token in the flattened padded batch, int32 [T]; None where there is no padding.
        slots: for every place of the padded batch the token that lies there, 0 for padding, int32 [rows * width]; None
            where there is no padding.
        elsewhere: copies on other devices.
    """

    batch_size: int
    width: int
    longest: int
    positions: Tensor
    offsets: Tensor
    index: Tensor | None
    slots: Tensor | None
    elsewhere: dict[torch.device, Packing] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> Packing:
        """The packing of rows of these lengths, padded on the right to `width` columns; one copy to the device."""
        rows = np.asarray(lengths, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(rows)])
        row = np.repeat(np.arange(len(rows)), rows)
        positions = np.arange(offsets[-1]) - offsets[:-1][row]
        parts = [positions, offsets]
        padded = bool((rows < width).any())
        if padded:
            column = np.arange(width)
            slots = np.where(column < rows[:, None], offsets[:-1, None] + column, 0)
            parts += [row * width + positions, slots.ravel()]
        host = torch.from_numpy(np.concatenate(parts).astype(np.int32))
        on_device = to_device(host, device).split([len(part) for part in parts])
        index, slot = on_device[2:] if padded else (None, None)
        return cls(len(rows), width, int(rows.max()), on_device[0], on_device[1], index, slot)

    def on(self, device: torch.device) -> Packing:
        """The same packing on a device, copied there once."""
        if self.offsets.device == device:
            return self
        if device not in self.elsewhere:
            names = ("positions", "offsets", "index", "slots")
            moved = {name: x.to(device) for name in names if (x := getattr(self, name)) is not None}
            self.elsewhere[device] = replace(self, **moved, elsewhere={})
        return self.elsewhere[device]

    def pack(self, x: Tensor) -> Tensor:
        """[rows, width, ...] as [T, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, ...] as [rows, width, ...], on the device of x; padding repeats the first token."""
        slots = self.on(x.device).slots
        flat = x if slots is None else x.index_select(0, slots)
        return flat.view(self.batch_size, self.width, *x.shape[1:])


def plain_addresses(module: nn.Module, allowed: Collection[type[nn.Module]]) -> tuple[int, ...] | None:
    """Addresses of all parameters and buffers of a plain module, which tell whether they were replaced; else None."""
    return _tree_of(module).addresses() if is_plain(module, allowed) else None


def is_plain(module: nn.Module, allowed: Collection[type[nn.Module]]) -> bool:
    """Whether the computation of a module may be replaced: its submodules are all of an allowed class, unhooked and
    with their class's own forward.

    Adapters replace modules or their forward, or hook into them; offloaded layers do, too. A call takes some 0.1 ms for
    33 layers, as it does not walk the tree again while it stays the same, and its loops run in C.
    """
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return False
    return _tree_of(module).is_plain(allowed)


def _tree_of(module: nn.Module) -> _Tree:
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
        """Whether a submodule was replaced, added or removed, or the tree is that of a module copied from."""
        return self.states[0] is not module.__dict__ or self._listed() != self.known

    def is_plain(self, allowed: Collection[type[nn.Module]]) -> bool:
        hooks = filter(None, chain.from_iterable(map(_HOOKS, self.states)))
        return (
            {self.root, *map(type, self.submodules)} <= set(allowed)
            and not any(map(operator.contains, self.states, repeat("forward")))
            and all(map(_is_replaced, chain.from_iterable(own.values() for own in hooks)))
        )

    def addresses(self) -> tuple[int, ...]:
        held = chain.from_iterable([state[name].values() for state, name in self.holders])
        return tuple(map(Tensor.data_ptr, [x for x in held if x is not None]))


def is_recorder(hook: Any) -> bool:
    """Whether a hook is the library's own, which records hidden states while a forward asks for them."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.utils.")


def _is_replaced(hook: Any) -> bool:
    """Whether the packed encoder does what a hook does, or need not."""
    return type(hook) is ToWeights or is_recorder(hook)


def is_unhooked(module: nn.Module) -> bool:
    """Whether a call of a module, submodules aside, runs its class's forward and nothing else."""
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    return "forward" not in module.__dict__ and all(map(is_recorder, hooks))


Attend = Callable[[int, Tensor], Tensor]
"""Attention of a layer: its index, and scaled queries, keys and values, after RoPE, [T, 3, heads, head_dim], give
[T, heads * head_dim]."""


def attention_of_rows(packing: Packing, ops: ModuleType, session: KVSession | None) -> Attend:
    """Attention of every row's tokens to each other.

    Args:
        packing: of the rows.
        ops: `triton_encoder`, or its reference `torch_encoder`.
        session: is shown the keys and values of every layer as a padded batch.
    """

    def attend(layer_idx: int, qkv: Tensor) -> Tensor:
        if session is not None:
            keys, values = (x.transpose(1, 2) for x in packing.unpack(qkv[:, 1:]).unbind(2))
            session.attend(layer_idx, keys, keys, values)
        attended: Tensor = ops.attend(qkv, packing.on(qkv.device).offsets, packing.longest)
        return attended.flatten(1)

    return attend


def attention_to_cache(session: Extension, batch_size: int) -> Attend:
    """Attention of the tokens of `batch_size` rows of equal length to a cache and to each other."""

    def attend(layer_idx: int, qkv: Tensor) -> Tensor:
        query, keys, values = qkv.view(batch_size, -1, *qkv.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        return session.attend(layer_idx, query, keys, values).transpose(1, 2).reshape(len(qkv), -1)

    return attend


def packed_encoder(
    encoder: Any,
    inv_freq: Tensor,
    hidden_states: Tensor,
    positions: Tensor,
    ops: ModuleType,
    attend: Attend,
    layers: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """Runs an `EsmEncoder` on packed tokens.

    Args:
        encoder: whose modules are plain, see `plain_addresses`.
        inv_freq: of the rotary embedding, float32 [head_dim / 2].
        hidden_states: packed embeddings, [T, hidden_size].
        positions: of every token in its row, integers [T].
        ops: `triton_encoder`, or its reference `torch_encoder`.
        attend: computes attention.
        layers: whose input is returned as well, 0 for the embeddings; the last layer's output is the first result.

    Returns:
        The last hidden states after the final layer norm, [T, hidden_size], and those of `layers`.
    """
    angle = positions[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    layers_of = _layers(encoder)
    # Layers may lie on several devices.
    hidden_states, cos, sin = beside(layers_of[0].norms[0][0], hidden_states, cos, sin)
    residual, normed = ops.add_layer_norm(hidden_states, None, *layers_of[0].norms[0])
    states: dict[int, Tensor] = {}
    for index, layer in enumerate(layers_of):
        if index in layers:
            states[index] = residual
        qkv = ops.linear(normed, *layer.qkv).view(-1, 3, layer.heads, layer.head_dim)
        ops.rotate_(qkv, cos, sin, layer.head_dim**-0.5)
        delta = ops.linear_parts(attend(index, qkv), *layer.dense)
        residual, normed = ops.add_layer_norm(residual, delta, *layer.norms[1])
        inside = ops.linear(normed, *layer.inner, activates=True)
        delta = ops.linear_parts(inside, *layer.outer)
        residual, delta, cos, sin = beside(layer.norms[2][0], residual, delta, cos, sin)
        residual, normed = ops.add_layer_norm(residual, delta, *layer.norms[2])
    return normed, states


_Linear = tuple[Tensor, Tensor]
_Norm = tuple[Tensor, Tensor, float]


class _Layer(NamedTuple):
    """Parameters of a layer.

    Attributes:
        heads: number of attention heads.
        head_dim: components per head.
        qkv: fused projection to queries, keys and values.
        dense: of the attention's output.
        inner: of the feed-forward network.
        outer: of its output.
        norms: before the attention, before the feed-forward network, and that of the next layer, or the last one.
    """

    heads: int
    head_dim: int
    qkv: _Linear
    dense: _Linear
    inner: _Linear
    outer: _Linear
    norms: tuple[_Norm, _Norm, _Norm]


class _Layers(list[_Layer]):
    """Parameters of all layers, at these addresses; copies of an encoder have their own."""

    addresses: tuple[int, ...] = ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _layers(encoder: Any) -> _Layers:
    """The parameters of an encoder's layers, remembered while their addresses stay.

    To look them up in the tree of modules takes the host longer than to launch what uses them.
    """
    addresses = _tree_of(encoder).addresses()
    # Held here, the storage stays alive, so that equal addresses mean the same weights.
    remembered: _Layers | None = encoder.__dict__.get("_packed_layers")
    if remembered is None or remembered.addresses != addresses:
        norms = [_norm(layer.attention.LayerNorm) for layer in encoder.layer] + [_norm(encoder.emb_layer_norm_after)]
        remembered = _Layers()
        for layer, before, after in zip(encoder.layer, norms, norms[1:], strict=False):
            attention = layer.attention.self
            fused = fuse_linears((attention.query, attention.key, attention.value))
            assert fused is not None
            dense, inner, outer = (
                (linear.weight, linear.bias)
                for linear in (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense)
            )
            sizes = attention.num_attention_heads, attention.attention_head_size
            norms_of = (before, _norm(layer.LayerNorm), after)
            remembered.append(_Layer(*sizes, fused, dense, inner, outer, norms_of))
        # Fused parameters have moved.
        remembered.addresses = _tree_of(encoder).addresses()
        encoder.__dict__["_packed_layers"] = remembered
    return remembered


def _norm(norm: nn.LayerNorm) -> _Norm:
    return norm.weight, norm.bias, norm.eps
