"""The order of components in the kernels' operands, and the maps in that order; no kernel runs here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from esm_turbo import TurboConfig
from esm_turbo.codecs import FieldSlab, KVCodec, Packed, TurboCodec
from esm_turbo.codecs.packing import unpack_codes
from esm_turbo.codecs.turbo import slabs
from esm_turbo.config import Geometry
from esm_turbo.ops.triton_layout import (
    SlabSpec,
    field_scale,
    key_order,
    key_view,
    quads_to_pairs,
    triton_layout,
    value_order,
    value_view,
)
from tests.helpers.attention_cases import LAYER, codec_of

KINDS = {"key": (key_view, key_order), "value": (value_view, value_order)}
HEADS = 2


def falling(runs: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 8), min_size=runs, max_size=runs).map(lambda widths: sorted(widths, reverse=True))


def codec_of_widths(key_widths: list[int], value_widths: list[int], size: int, seed: int = 0) -> TurboCodec:
    """A codec of one layer with these widths and random maps."""
    head_dim = len(key_widths) * size
    generator = torch.Generator().manual_seed(seed)
    state = {"inv_freq": torch.rand(1, head_dim // 2, generator=generator)}
    for kind, widths in (("key", key_widths), ("value", value_widths)):
        matrix = torch.linalg.qr(torch.randn(1, HEADS, head_dim, head_dim, generator=generator))[0]
        state |= {
            f"{kind}_map": matrix,
            f"{kind}_inverse": matrix.transpose(-1, -2),
            f"{kind}_mean": torch.randn(1, HEADS, head_dim, generator=generator),
            f"{kind}_widths": torch.tensor([widths]),
            f"{kind}_steps": torch.rand(1, head_dim, generator=generator) + 0.5,
        }
    return TurboCodec(TurboConfig.from_preset("turbo3"), Geometry(1, HEADS, head_dim), state)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 8).flatmap(falling), st.sampled_from([8, 16]), st.sampled_from(sorted(KINDS)))
@example([1, 0], 8, "key")
@example([1] * 8, 16, "key")
@example([8] * 8, 16, "value")
def test_every_component_has_one_index(widths: list[int], size: int, kind: str) -> None:
    make_view, make_order = KINDS[kind]
    for slab in slabs(widths, size):
        components = tuple(range(slab.num_components))
        view = make_view(FieldSlab("slab", slab.bits, components, (1.0,) * len(components)))
        spec = view.spec
        order = make_order(spec)
        assert sorted(component for component in order if component >= 0) == list(components)
        assert len(order) <= spec.size
        # Triton needs powers of two, a tensor core at least 16.
        for number in (spec.words, spec.elements, spec.element_bits, spec.size):
            assert number & number - 1 == 0
        assert spec.size >= 16
        assert spec.element_bits % spec.bits == 0
        assert spec.elements * spec.element_bits == 8 * slab.num_bytes
        words = view.of({"slab": torch.zeros(3, 2, 5, slab.num_bytes, dtype=torch.uint8)})
        assert words.shape == (3, 2, 5, spec.words)
        assert words.element_size() * spec.words == slab.num_bytes


def test_order_of_a_key_in_four_lanes() -> None:
    """32 fields of 4 bits in four words: a lane's word gives four consecutive components, two from each half."""
    spec = key_view(FieldSlab("slab", 4, tuple(range(32)), (1.0,) * 32)).spec
    assert (spec.words, spec.elements, spec.element_bits, spec.size) == (4, 4, 32, 32)
    first = [0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24, 28, 25, 29]
    assert key_order(spec) == first + [component + 2 for component in first]


def test_order_of_a_value_in_eight_lanes() -> None:
    """The same fields as a value: eight lanes take half a word each and hold its fields one after the other."""
    spec = value_view(FieldSlab("slab", 4, tuple(range(32)), (1.0,) * 32)).spec
    assert (spec.words, spec.elements, spec.element_bits, spec.size) == (4, 8, 16, 32)
    assert value_order(spec) == [lane * 4 + field for field in range(4) for lane in range(8)]


def operand(spec: SlabSpec, order: list[int], slab: Tensor, table: Tensor | None, half: bool) -> Tensor:
    """The operand of a kernel for every token, [C, H, L, size].

    Args:
        spec: of the slab.
        order: of its components.
        slab: the bytes.
        table: float32 [H, 16] of a slab whose fields are looked up.
        half: whether fields count from 0, or from -2^(bits - 1).
    """
    fields = unpack_codes(slab, spec.bits)
    held = torch.zeros(*fields.shape[:3], spec.size)
    for index, component in enumerate(order):
        if component >= 0:
            field = fields[..., component].long()
            if spec.table:
                held[..., index] = torch.stack([table[head][field[:, head]] for head in range(len(table))], dim=1)
            else:
                scale = field_scale(spec, component)
                held[..., index] = scale * (field - 2 ** (spec.bits - 1) * (not half))
    return held


def assert_maps_keep_scores_and_values(
    codec: KVCodec, layer: int, stored: tuple[str, ...], packed: Packed, half: bool
) -> None:
    """Operands and maps give the scores and values of the codec's own decoding, to 1e-5 of the largest."""
    packed = {name: packed[name] for name in stored}
    layout = triton_layout(codec, layer, stored, torch.device("cpu"), half)
    heads, head_dim = codec.geometry.num_heads, codec.geometry.head_dim
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 3, head_dim, generator=generator)

    halves = torch.stack([query[..., : head_dim // 2], query[..., head_dim // 2 :]], dim=2)
    mapped = torch.einsum("bhsnd,hspd->bhnp", halves, layout.query_map[..., : head_dim // 2])
    assert (layout.query_map[..., head_dim // 2 :] == 0).all()
    assert torch.allclose(layout.query_map.abs().amax(dim=(1, 2, 3)), torch.ones(heads))
    operands = [
        operand(view.spec, key_order(view.spec), packed[view.name], layout.key_table, half) for view in layout.keys
    ]
    keys = torch.cat(operands, dim=3)
    keys = keys[..., quads_to_pairs(keys.shape[-1])]
    scores = layout.map_scale[:, None, None] * (mapped @ (keys + layout.field_bias.float()).transpose(2, 3))
    scores = scores + (query * layout.means[0][:, None]).sum(-1, keepdim=True)
    operands = [
        operand(view.spec, value_order(view.spec), packed[view.name], layout.value_table, half)
        for view in layout.values
    ]
    unit = 2.0**-24 if half and layout.value_table is None else 1.0
    centred = torch.cat(operands, dim=3) * unit - layout.value_middle
    values = centred * layout.value_scale[:, None, None] @ layout.value_map + layout.means[1][:, None]

    expected_query, offset = codec.map_query(layer, query)
    expected = expected_query[:, :, 0] @ codec.unpack(layer, "key", packed).transpose(2, 3)
    expected = expected if offset is None else expected + offset[:, :, 0]
    expected_values = codec.unmap_output(layer, codec.unpack(layer, "value", packed))
    assert (scores - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (values - expected_values).abs().max() <= 1e-5 * expected_values.abs().max()


def random_packed(codec: KVCodec, layer: int, tokens: int = 5) -> Packed:
    generator = torch.Generator().manual_seed(1)
    packed = {}
    for slab in codec.field_slabs(layer, "key") + codec.field_slabs(layer, "value"):
        shape = (2, codec.geometry.num_heads, tokens, len(slab.components) * slab.bits // 8)
        packed[slab.name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return packed


@settings(deadline=None, max_examples=60)
@given(
    widths=st.integers(2, 8).flatmap(lambda runs: st.tuples(falling(runs), falling(runs))),
    dropped=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(([8, 7, 6, 5, 3, 3, 3, 2], [7, 4, 3, 3, 1, 1, 0, 0]), True, True, 0)
def test_maps_of_any_widths(widths: tuple[list[int], list[int]], dropped: bool, half: bool, seed: int) -> None:
    assume(all(map(any, widths)))
    codec = codec_of_widths(*widths, 8, seed)
    packed = random_packed(codec, 0)
    stored = tuple(name for name in packed if not dropped or name not in codec.refinements(0))
    assert_maps_keep_scores_and_values(codec, 0, stored, packed, half)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("preset", ["turbo4", "turbo1", "paper"])
@pytest.mark.parametrize("half", [True, False])
def test_maps_of_presets(half: bool, preset: str, head_dim: int) -> None:
    codec = codec_of(preset, head_dim)
    packed = random_packed(codec, LAYER)
    assert_maps_keep_scores_and_values(codec, LAYER, tuple(packed), packed, half)
