"""ESM-2's encoder for inference in half precision on CUDA, on packed rows and with fused operations.

Hugging Face's forward pads every row, and spends more time in unfused operations between matrix products than in the
products. Here rows are packed; queries, keys and values are one product; residual sums are fused with the layer norm
that follows; rotation and activation run in place.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from esm_turbo.model.plain import addresses_of, tree_of
from esm_turbo.model.plan import PackedTokens
from esm_turbo.model.projections import MOVING, LinearParameters, fuse_linears
from esm_turbo.model.spread import to_weight_device


def packed_encoder(encoder: Any, tokens: PackedTokens, ops: ModuleType) -> tuple[Tensor, dict[int, Tensor]]:
    """Run an `EsmEncoder` on packed tokens; see `FamilyEncoder.run_packed`.

    Args:
        encoder: whose modules are plain, see `plain_addresses`.
        tokens: of all rows.
        ops: `triton_encoder`, or another module with its operations.
    """
    layers_of = _layers(encoder)
    first_norm = layers_of[0].norms[0]
    # Layers may lie on several devices.
    (hidden_states,) = to_weight_device(first_norm[0], tokens.embeddings)
    residual, normed = ops.add_layer_norm(hidden_states, None, *first_norm, quantizes=layers_of[0].qkv.quantizes)
    states: dict[int, Tensor] = {}
    for index, (layer, following) in enumerate(zip(layers_of, [*layers_of[1:], None], strict=True)):
        if index in tokens.layers:
            states[index] = residual
        qkv = ops.linear(normed, *layer.qkv).view(-1, 3, layer.heads, layer.head_dim)
        ops.rotate_(qkv, *tokens.rotary.at(index, qkv.device), layer.head_dim**-0.5)
        delta = ops.linear_parts(tokens.attend(index, qkv), *layer.dense)
        residual, normed = ops.add_layer_norm(residual, delta, *layer.norms[1], quantizes=layer.inner.quantizes)
        inside = ops.linear(normed, *layer.inner, activates=True, quantizes=layer.outer.quantizes)
        delta = ops.linear_parts(inside, *layer.outer)
        residual, delta = to_weight_device(layer.norms[2][0], residual, delta)
        quantizes = following is not None and following.qkv.quantizes
        residual, normed = ops.add_layer_norm(residual, delta, *layer.norms[2], quantizes=quantizes)
    return normed, states


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
    qkv: LinearParameters
    dense: LinearParameters
    inner: LinearParameters
    outer: LinearParameters
    norms: tuple[_Norm, _Norm, _Norm]


class _Layers(list[_Layer]):
    """Parameters of all layers, at these addresses and with these epsilons; copies of an encoder have their own."""

    addresses: tuple[tuple[int, ...], list[float | None]] = (), []

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _layers(encoder: Any) -> _Layers:
    """The parameters of an encoder's layers, remembered while their addresses stay.

    To look them up in the tree of modules takes the host longer than to launch what uses them.
    """
    # Held here, the storage stays alive, so that equal addresses mean the same weights.
    remembered: _Layers | None = encoder.__dict__.get("_packed_layers")
    if remembered is None or remembered.addresses != _addresses(encoder):
        with MOVING:
            remembered = encoder.__dict__["_packed_layers"] = _fused(encoder)
    return remembered


def _addresses(encoder: Any) -> tuple[tuple[int, ...], list[float | None]]:
    tree = tree_of(encoder)
    return addresses_of(tree.held()), tree.epsilons()


def _fused(encoder: Any) -> _Layers:
    """The parameters of an encoder's layers, fused; see `_layers`."""
    norms = [_norm(layer.attention.LayerNorm) for layer in encoder.layer] + [_norm(encoder.emb_layer_norm_after)]
    layers = _Layers()
    for layer, before, after in zip(encoder.layer, norms, norms[1:], strict=False):
        attention = layer.attention.self
        fused = fuse_linears((attention.query, attention.key, attention.value))
        assert fused is not None
        dense, inner, outer = map(
            LinearParameters.of, (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense)
        )
        sizes = attention.num_attention_heads, attention.attention_head_size
        layers.append(_Layer(*sizes, fused, dense, inner, outer, (before, _norm(layer.LayerNorm), after)))
    # Fused parameters have moved.
    layers.addresses = _addresses(encoder)
    return layers


def _norm(norm: nn.LayerNorm) -> _Norm:
    return norm.weight, norm.bias, norm.eps
