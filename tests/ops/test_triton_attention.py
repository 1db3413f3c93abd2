"""The Triton kernels of the packed attention, tested alike in Triton's interpreter and on a GPU.

The interpreter needs seconds where a GPU needs microseconds, so its cases are few and small. It cannot find loads out
of bounds (it reads zeros), races, or anything that depends on a GPU's arithmetic. bfloat16 is tested on a GPU only,
because the interpreter's products of bfloat16 are wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esm_turbo import TurboConfig
from esm_turbo.codecs import FieldSlab, KVCodec, Packed, TurboCodec
from esm_turbo.codecs.packing import unpack_codes
from esm_turbo.codecs.row_index import StaticRowIndex
from esm_turbo.kv.tensors import into_room, with_room
from esm_turbo.ops import attention_plan, triton_attention
from esm_turbo.ops.stream_k import StreamKSchedule
from esm_turbo.ops.triton_attention import pack_mask
from esm_turbo.ops.triton_layout import key_order, key_view, value_order, value_view
from tests.helpers.attention_cases import LAYER, Case, codec_of, codec_with_gains, make_case
from tests.helpers.models import random_ids
from tests.helpers.triton_devices import DTYPES, RecordedCalls, on_devices, right_triton  # noqa: F401 - the fixture

PRESETS = ("turbo4", "turbo3", "turbo2", "turbo1", "paper")
HEAD_DIMS = (16, 24, 32, 64, 128)
NEW_TOKENS = (1, 3, 17)
COLUMNS = (1, 17, 63, 64, 70, 1000)
# Float32 against float64, relative to the largest output: the rounding of a score carries over to its exponential.
TOLERANCE = 1e-5


def tune(monkeypatch: pytest.MonkeyPatch, **settings: int) -> None:
    monkeypatch.setattr(triton_attention, "DEFAULT_TUNING", replace(triton_attention.DEFAULT_TUNING, **settings))


def attend(case: Case, codec: KVCodec) -> Tensor:
    return triton_attention.extend_attention(*case.arguments, codec, LAYER)


def assert_close(output: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Largest error, relative to the largest output."""
    assert output.shape == expected.shape
    assert torch.isfinite(output).all()
    error = (output.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert error <= tolerance


def assert_as_good_as_plain(output: Tensor, case: Case) -> None:
    """Root mean square and largest error are at most twice those of PyTorch's attention in the same dtype.

    The largest error is a statistic of few numbers, so it may exceed this by half a unit in the last place of the
    largest output.
    """
    expected = case.expected()
    plain = case.plain()
    assert output.dtype == plain.dtype
    assert torch.isfinite(output).all()
    ours, theirs = ((x.double() - expected).abs() for x in (output, plain))
    assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt()
    unit = torch.finfo(output.dtype).eps * expected.abs().max()
    assert ours.max() <= 2 * theirs.max() + unit / 2


@on_devices("preset, head_dim", cpu=itertools.product(PRESETS, HEAD_DIMS), gpu=itertools.product(PRESETS, HEAD_DIMS))
def test_every_format_and_head_size(device: str, preset: str, head_dim: int) -> None:
    """Separate contexts of unequal lengths, masks, and protected tokens, in float32."""
    codec = codec_of(preset, head_dim)
    assert triton_attention.can_run(codec)
    case = make_case(codec, lengths=(70, 33), slots=2, masked=True, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices(
    "preset, head_dim", cpu=[("turbo3", 16), ("turbo1", 64)], gpu=itertools.product(("turbo3", "turbo1"), HEAD_DIMS)
)
def test_components_have_gains(device: str, preset: str, head_dim: int) -> None:
    codec = codec_with_gains(preset, head_dim)
    case = make_case(codec, lengths=(70, 33), masked=True, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices(
    "preset, head_dim, dtype",
    cpu=[("turbo3", 64, "float16"), ("turbo1", 32, "float16"), ("paper", 64, "float16")],
    gpu=itertools.product(PRESETS, HEAD_DIMS, ("float16", "bfloat16")),
)
@pytest.mark.parametrize("n", [1, 17])
def test_half_precision(device: str, preset: str, head_dim: int, dtype: str, n: int) -> None:
    codec = codec_of(preset, head_dim)
    columns = 70 if device == "cpu" else 1000
    case = make_case(
        codec, n=n, columns=columns, lengths=(columns, 33), slots=1, masked=True, dtype=DTYPES[dtype], device=device
    )
    assert_as_good_as_plain(attend(case, codec), case)


@pytest.mark.parametrize("size", [0.0, 1e-30, 0.7, 3.0, 1e5])
def test_maps_in_half_precision_keep_their_size(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    codec = codec_of("turbo3", 32)
    state = codec.layer_state(LAYER, torch.device("cpu"))
    scaled = state | {"value_inverse": state["value_inverse"] * size}
    monkeypatch.setattr(type(codec), "layer_state", lambda *_: scaled)
    stored = tuple(slab.name for kind in ("key", "value") for slab in codec.field_slabs(LAYER, kind))
    layouts = [
        # Of what is remembered per codec, which would outlive the changed state.
        triton_attention._layout.__wrapped__(codec, LAYER, stored, torch.device("cpu"), dtype)
        for dtype in (torch.float16, torch.bfloat16)
    ]
    exact, rounded = (layout.value_map.double() * layout.value_scale[:, None, None] for layout in layouts)
    assert layouts[1].value_map.dtype == torch.float16
    assert torch.isfinite(rounded).all()
    assert (rounded - exact).abs().amax() <= exact.abs().amax() * 2**-11


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_a_device_that_is_not_the_current_one(preset: str) -> None:
    """Another device than the current one, where there are several."""
    codec = codec_of(preset, 64)
    device = f"cuda:{torch.cuda.device_count() - 1}"
    case = make_case(codec, n=1, columns=1000, lengths=(1000, 33), slots=1, dtype=torch.bfloat16, device=device)
    with torch.cuda.device(0):
        assert_as_good_as_plain(attend(case, codec), case)


# Contexts of any lengths, and the context of each row.
INDEXES = {
    "one row each": ((70, 33, 64), (2, 0, 1)),
    "few of many": ((70, 33, 64, 1, 20), (4, 1, 1)),
    "many rows": ((130, 5), (1, 1, 1, 1, 0, 0)),
}


@on_devices(
    "preset, named, n, dtype, masked",
    cpu=[
        ("turbo3", "one row each", 1, "float32", False),
        ("turbo3", "few of many", 3, "float32", True),
        ("turbo1", "many rows", 5, "float32", True),
        ("paper", "many rows", 1, "float32", False),
        ("turbo2", "few of many", 17, "float16", True),
    ],
    gpu=itertools.product(PRESETS, INDEXES, (1, 3, 17, 40), DTYPES, (False, True)),
)
def test_rows_name_their_contexts(device: str, preset: str, named: str, n: int, dtype: str, masked: bool) -> None:
    """Contexts that no row names are not read; protected tokens and mean residuals are those of the named ones."""
    codec = codec_of(preset, 64 if device == "cuda" else 16)
    lengths, index = INDEXES[named]
    case = make_case(
        codec, lengths=lengths, columns=max(lengths), index=index, n=n, slots=2, masked=masked, dtype=DTYPES[dtype],
        device=device,
    )  # fmt: skip
    if dtype == "float32":
        assert_close(attend(case, codec), case.expected())
    else:
        assert_as_good_as_plain(attend(case, codec), case)


@on_devices("programs, n", cpu=[(3, 1), (7, 3)], gpu=itertools.product((1, 3, 17, 1000), (1, 3, 17)))
def test_named_contexts_over_any_programs(monkeypatch: pytest.MonkeyPatch, device: str, programs: int, n: int) -> None:
    """Programs that read parts of an item, or several items, of contexts of different lengths."""
    tune(monkeypatch, programs=programs)
    codec = codec_of("turbo2", 16)
    case = make_case(codec, lengths=(200, 64, 130), columns=200, index=(1, 1, 2, 0, 0), n=n, slots=1, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices("n", cpu=[(3,)], gpu=[(1,), (3,), (21,)])
def test_an_index_of_a_graph_reads_the_same(device: str, n: int) -> None:
    """It has tiles for any contexts of its rows, most of them empty."""
    codec = codec_of("turbo3", 16)
    case = make_case(codec, lengths=(70, 20, 33), columns=70, index=(1, 1, 2, 2), n=n, slots=1, device=device)
    static = StaticRowIndex(4, 4)
    static.load(case.context.index)
    found = attend(replace(case, context=replace(case.context, index=static)), codec)
    assert_close(found, case.expected())


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "preset, head_dim", [("turbo4", 64), ("turbo2", 32), ("turbo1", 16), ("turbo3", 128), ("paper", 64), ("paper", 24)]
)
@pytest.mark.parametrize("n", [1, 9])
def test_half_precision_with_assembly(monkeypatch: pytest.MonkeyPatch, preset: str, head_dim: int, n: int) -> None:
    """The inline assembly that a GPU runs in place of the interpreter's arithmetic."""
    from tests.helpers import triton_assembly

    triton_assembly.use(monkeypatch)
    codec = codec_of(preset, head_dim)
    case = make_case(codec, n=n, lengths=(130, 33), slots=1, masked=n > 1, dtype=torch.float16, device="cpu")
    assert_as_good_as_plain(attend(case, codec), case)


@pytest.mark.interpreter
@pytest.mark.parametrize("n, prefetches", [(1, True), (3, False), (16, False)])
def test_long_contexts_are_prefetched(monkeypatch: pytest.MonkeyPatch, n: int, prefetches: bool) -> None:
    from tests.helpers import ptx, triton_assembly

    triton_assembly.use(monkeypatch)
    tune(monkeypatch, programs=1)
    codec = codec_of("turbo2", 32)
    lengths = (700, 50)
    case = make_case(codec, n=n, columns=700, lengths=lengths, slots=1, dtype=torch.float16, device="cpu")
    ptx.prefetched.clear()
    assert_as_good_as_plain(attend(case, codec), case)
    for slab in case.context.packed.values():
        for row, length in enumerate(lengths):
            for head in slab[row]:
                tiles = -(-length // 64)
                first, last = head.data_ptr(), head.data_ptr() + min(64 * tiles, 700) * head.shape[1]
                assert any(first <= address < last for address in ptx.prefetched) == (prefetches and tiles > 2)
                assert not any(last <= address < first + head.nbytes for address in ptx.prefetched)


@pytest.mark.interpreter
def test_float32_with_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers import triton_assembly

    triton_assembly.use(monkeypatch)
    codec = codec_of("turbo3", 32)
    case = make_case(codec, n=3, lengths=(70, 33), slots=2, device="cpu")
    assert_close(attend(case, codec), case.expected())


# Every kind of operand: fields of all sizes, in elements of 1 to 32 bits.
OPERANDS = [
    (kind, bits, components)
    for kind, bits, components in itertools.product(("key", "value"), (1, 2, 4, 8), (8, 16, 32, 64, 128))
]


@on_devices("kind, bits, components", cpu=OPERANDS, gpu=OPERANDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rows", [8, 16])
def test_operands_are_in_the_order_that_the_maps_expect(
    device: str, kind: str, bits: int, components: int, dtype: str, rows: int
) -> None:
    """Each index holds exactly the fields of one component, times a power of two; in float32 less the middle one."""
    from tests.helpers.triton_probe import operand

    slab = FieldSlab("slab", bits, tuple(range(components)), (1.0,) * components)
    view = key_view(slab) if kind == "key" else value_view(slab)
    order = key_order(view.spec) if kind == "key" else value_order(view.spec)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (61, components * bits // 8), generator=generator, dtype=torch.uint8)
    fields = unpack_codes(packed, bits).float()
    words = view.of({"slab": packed.to(device)})
    found = operand(kind, view.spec, words, None, DTYPES[dtype], rows).cpu()[: len(packed)]
    if kind == "key":
        spread = operand(kind, view.spec, words, None, DTYPES[dtype], rows, spread=True).cpu()[: len(packed)]
        assert torch.equal(spread, found)
    assert torch.isfinite(found).all()
    unit = 2.0**-24 if dtype == "float16" else 1.0
    assert sorted(component for component in order if component >= 0) == list(range(components))
    for index, component in enumerate(order):
        if component >= 0:
            field, held = fields[:, component], found[:, index]
            low, high = field.argmin(), field.argmax()
            slope = (held[high] - held[low]) / (field[high] - field[low])
            assert (slope / unit).log2() in range(8)
            assert torch.equal(held, slope * (field - (0 if dtype == "float16" else 2 ** (bits - 1))))


@pytest.mark.interpreter
@pytest.mark.parametrize("kind, bits, components", OPERANDS)
@pytest.mark.parametrize("rows", [8, 16])
def test_operands_with_assembly(
    monkeypatch: pytest.MonkeyPatch, kind: str, bits: int, components: int, rows: int
) -> None:
    """The same operands as without assembly."""
    from tests.helpers import triton_assembly
    from tests.helpers.triton_probe import operand

    triton_assembly.use(monkeypatch)
    slab = FieldSlab("slab", bits, tuple(range(components)), (1.0,) * components)
    view = key_view(slab) if kind == "key" else value_view(slab)
    packed = torch.randint(0, 256, (64, components * bits // 8), dtype=torch.uint8)
    words = view.of({"slab": packed})
    found, expected = (
        operand(kind, view.spec, words, None, torch.float16, rows, assembly=assembly) for assembly in (True, False)
    )
    assert torch.equal(found, expected)


@on_devices(cpu=["key", "value"], gpu=["key", "value"], names="kind")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("components", [16, 64])
@pytest.mark.parametrize("rows", [8, 16])
def test_operands_of_looked_up_fields(device: str, kind: str, dtype: str, components: int, rows: int) -> None:
    from tests.helpers.triton_probe import operand

    slab = FieldSlab("slab", 4, tuple(range(components)), (1.0,) * components, "table")
    view = key_view(slab) if kind == "key" else value_view(slab)
    order = key_order(view.spec) if kind == "key" else value_order(view.spec)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (64, components // 2), generator=generator, dtype=torch.uint8)
    table = torch.randn(16, generator=generator)
    words = view.of({"slab": packed.to(device)})
    found = operand(kind, view.spec, words, table.to(device, DTYPES[dtype]), DTYPES[dtype], rows).cpu()
    expected = table.to(DTYPES[dtype]).float()[unpack_codes(packed, 4).long()]
    assert torch.equal(found, expected[:, order])


@on_devices(
    "n, columns, shared",
    cpu=[(1, 1, False), (3, 17, True), (17, 63, False), (1, 64, True), (17, 70, True)],
    gpu=itertools.product(NEW_TOKENS, COLUMNS, (False, True)),
)
@pytest.mark.parametrize("preset", ["turbo3", "paper"])
def test_lengths(device: str, n: int, columns: int, shared: bool, preset: str) -> None:
    """Contexts of all lengths, with nothing hidden."""
    codec = codec_of(preset, 32)
    case = make_case(codec, n=n, columns=columns, shared=shared, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices("columns, programs", cpu=[(585, 1), (585, 4)], gpu=itertools.product((585, 1000, 2500), (1, 64, 2048)))
@pytest.mark.parametrize("preset", ["turbo1", "paper"])
@pytest.mark.parametrize("n", [1, 5])
def test_many_blocks_by_any_number_of_programs(
    device: str, columns: int, programs: int, n: int, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than are processed at once; `turbo1` rotates the query for each of them."""
    tune(monkeypatch, programs=programs)
    codec = codec_of(preset, 16)
    assert codec.block_size == (64 if preset == "turbo1" else None)
    case = make_case(codec, batch=1, n=n, columns=columns, masked=True, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices("n", cpu=[1, 3], gpu=[1, 3, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_programs_count_blocks_beyond_the_contexts(
    monkeypatch: pytest.MonkeyPatch, device: str, n: int, masked: bool
) -> None:
    """Three blocks as four, of which each program reads two: none reads two contexts."""
    monkeypatch.setattr(attention_plan, "best_schedule", lambda *_: StreamKSchedule.of(4, 2))
    # Without its memory of plans.
    monkeypatch.setattr(triton_attention, "attention_plan", attention_plan.attention_plan.__wrapped__)
    codec = codec_of("turbo3", 16)
    case = make_case(codec, n=n, columns=190, lengths=(190, 65), slots=1, masked=masked, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices(
    "batch, columns, programs", cpu=[(3, 300, 2), (5, 190, 7)], gpu=[(3, 300, 2), (64, 1000, 1000), (5, 4000, 7)]
)
@pytest.mark.parametrize("n", [1, 3, 16])
def test_a_program_reads_the_end_of_one_context_and_the_beginning_of_the_next(
    monkeypatch: pytest.MonkeyPatch, device: str, batch: int, columns: int, programs: int, n: int
) -> None:
    tune(monkeypatch, programs=programs)
    codec = codec_of("turbo2", 16)
    lengths = tuple(columns - 67 * row % columns for row in range(batch))
    case = make_case(codec, batch=batch, n=n, columns=columns, slots=1, lengths=lengths, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices()
def test_a_mask_without_lengths(device: str) -> None:
    """The mask alone defines the context, as for a context that does not come from a cache."""
    codec = codec_of("turbo3", 16)
    case = make_case(codec, lengths=(50, 70), masked=True, device=device)
    context = replace(case.context, lengths=None, protected_columns=None, visible=None)
    assert_close(attend(replace(case, context=context), codec), case.expected())


@on_devices(
    "scale, dtype",
    cpu=[(0.0, "float32"), *itertools.product((1e-30, 1e4), ("float32", "float16"))],
    gpu=itertools.product((0.0, 1e-30, 1e4), DTYPES),
)
@pytest.mark.parametrize("preset", ["turbo3", "paper"])
def test_queries_of_any_size(device: str, scale: float, dtype: str, preset: str) -> None:
    """Tiny queries weight all columns equally, huge ones select a single column."""
    codec = codec_of(preset, 32)
    case = make_case(codec, scale=scale, slots=1, masked=True, dtype=DTYPES[dtype], device=device)
    assert torch.isfinite(case.query).all()
    if dtype == "float32":
        assert_close(attend(case, codec), case.expected())
    else:
        assert_as_good_as_plain(attend(case, codec), case)


@on_devices()
@pytest.mark.parametrize("index", [None, ()], ids=["one context", "named contexts"])
def test_no_rows(device: str, index: tuple[int, ...] | None) -> None:
    codec = codec_of("turbo3", 16)
    lengths = (70,) if index is None else (70, 33)
    case = make_case(codec, lengths=lengths, columns=70, batch=0, n=1, index=index, device=device)
    assert attend(case, codec).shape == case.arguments[0].shape == (0, *case.arguments[0].shape[1:])


@on_devices(
    cpu=[("turbo3", "float32", False), ("paper", "float16", True)],
    gpu=itertools.product(PRESETS, DTYPES, (False, True)),
    names="preset, dtype, shared",
)
def test_memory_that_was_used_before(
    device: str, preset: str, dtype: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results do not depend on what outputs and scratch held before, here NaN; one part of a context is empty."""
    codec = codec_of(preset, 32)
    lengths = (12,) if shared else (70, 12)
    options = {"lengths": lengths, "shared": shared, "slots": 1, "masked": True}
    case = make_case(codec, **options, dtype=DTYPES[dtype], device=device)
    clean = attend(case, codec)
    empty, made = torch.empty, []

    def used(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.fill_(float("nan") if tensor.is_floating_point() else 77))
        return tensor

    monkeypatch.setattr(torch, "empty", used)
    output = attend(case, codec)
    monkeypatch.undo()
    assert any(tensor.data_ptr() == output.data_ptr() for tensor in made)
    assert torch.equal(output, clean)


@on_devices("preset, columns", cpu=[("turbo3", 70), ("paper", 17)], gpu=itertools.product(PRESETS, (17, 70, 300)))
def test_contexts_in_buffers_of_more_columns(device: str, preset: str, columns: int) -> None:
    """As caches are that appends are written into: the same bits, and the buffers are read where they are."""
    codec = codec_of(preset, 32)
    case = make_case(codec, columns=columns, lengths=(columns, columns // 2), slots=1, masked=True, device=device)
    output = attend(case, codec)
    # What is behind a row is another row's, or undefined.
    grown = {name: into_room(with_room(x, 2, 3 * columns), 2, 2 * columns) for name, x in case.context.packed.items()}
    for x in grown.values():
        x[:, :, columns:] = 255
    packed = {name: x[:, :, :columns] for name, x in grown.items()}
    with RecordedCalls("attend_packed") as recorded:
        found = attend(replace(case, context=replace(case.context, packed=packed)), codec)
    assert torch.equal(found, output)
    [call] = recorded.calls
    read = {slab.untyped_storage().data_ptr() for slab in (*call[4], *call[5])}
    assert read == {x.untyped_storage().data_ptr() for x in packed.values()}


@on_devices(cpu=["turbo3"], gpu=["turbo3", "turbo4", "paper"], names="preset")
def test_strides_of_any_kind(device: str, preset: str) -> None:
    """Slices of larger tensors, and components that are not contiguous."""
    codec = codec_of(preset, 16)
    case = make_case(codec, masked=True, device=device)
    expected = attend(case, codec)
    generator = torch.Generator().manual_seed(1)

    def within(x: Tensor) -> Tensor:
        larger = torch.randn(*(size + 3 for size in x.shape), generator=generator).to(x)
        view = larger[1:-2, 1:-2, 2:-1, 1:-2]
        return view.copy_(x)

    def scattered(x: Tensor) -> Tensor:
        return x.transpose(1, 3).contiguous().transpose(1, 3)

    for how in (within, scattered):
        query, keys, values = (how(x) for x in (case.query, case.keys, case.values))
        assert torch.equal(query, case.query)
        assert not query.is_contiguous()
        assert torch.equal(attend(replace(case, query=query, keys=keys, values=values), codec), expected)
    context = case.context
    layouts = {
        "room behind columns": lambda x: torch.cat([x, x], dim=2)[:, :, : x.shape[2]],
        "every other column": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
        "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "some heads": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    }
    for layout in layouts.values():
        packed = {name: layout(x) for name, x in context.packed.items()}
        assert not any(x.is_contiguous() for x in packed.values())
        assert torch.equal(attend(replace(case, context=replace(context, packed=packed)), codec), expected)
    # Slabs of one context that lie differently.
    mixed = {name: layout(x) for layout, (name, x) in zip(layouts.values(), context.packed.items(), strict=False)}
    assert torch.equal(attend(replace(case, context=replace(context, packed=context.packed | mixed)), codec), expected)


@on_devices(cpu=["turbo3"], gpu=PRESETS, names="preset")
@torch.no_grad()
def test_layers_of_a_forward_have_in_common_what_is_alike(device: str, preset: str) -> None:
    """Layers that differ in tensors alone are read by what the first one found; others are not."""
    codec = codec_of(preset, 16)
    first, other = (make_case(codec, slots=1, masked=True, device=device, seed=seed) for seed in (0, 1))
    common: dict[object, tuple[object, object]] = {}
    attend(replace(first, context=replace(first.context, common=common)), codec)

    def assert_same(query: Tensor, packed: Packed, *, again: bool) -> None:
        context = replace(first.context, packed=packed, protected=other.context.protected, rows=other.context.rows)
        case = replace(first, query=query, keys=other.keys, values=other.values, context=context)
        [(_, before)] = common.values()
        found = attend(replace(case, context=replace(context, common=common)), codec)
        assert torch.equal(found, attend(case, codec))
        [(_, after)] = common.values()
        assert (after is before) == again

    packed = other.context.packed
    assert_same(other.query, packed, again=True)
    assert_same(other.query.contiguous(), packed, again=False)
    room = {name: torch.cat([x, x], dim=2)[:, :, : x.shape[2]] for name, x in packed.items()}
    assert_same(other.query, room, again=False)
    # What has to be copied first is not remembered.
    copied = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in packed.items()}
    assert_same(other.query, copied, again=True)


@on_devices(
    "preset, head_dim",
    cpu=[("turbo3", 24), ("turbo4", 32), ("turbo3", 16), ("turbo3", 64)],
    gpu=itertools.product(PRESETS[:-1], HEAD_DIMS),
)
def test_slabs_of_all_sizes_and_without_planes(device: str, preset: str, head_dim: int) -> None:
    codec = planes_codec(preset, head_dim)
    planes = codec.refinements(LAYER)
    assert {name.partition("_")[0] for name in planes} == {"key", "value"}
    case = make_case(codec, lengths=(70, 33), slots=1, without=tuple(planes), masked=True, device=device)
    whole = make_case(codec, lengths=(70, 33), slots=1, masked=True, device=device)
    assert_close(attend(whole, codec), whole.expected())
    assert (case.expected() - whole.expected()).abs().max() > 1e-3
    assert_close(attend(case, codec), case.expected())


def planes_codec(preset: str, head_dim: int) -> KVCodec:
    """A codec with slabs of all sizes for keys and for values, in place of the fitted widths."""
    fitted = codec_of(preset, head_dim)
    runs = fitted.state["key_widths"].shape[1]
    widths = {"key": [8, 7, 6, 2, 1, 1, 0, 0], "value": [7, 4, 3, 3, 1, 1, 0, 0]}
    state = fitted.state | {f"{kind}_widths": torch.tensor([some[:runs]] * 2) for kind, some in widths.items()}
    for kind in widths:
        steps = 4.0 / 2.0 ** state[f"{kind}_widths"].repeat_interleave(head_dim // runs, dim=1)
        state[f"{kind}_steps"] = steps.float()
    return TurboCodec(fitted.config, fitted.geometry, state)


@on_devices()
def test_a_context_without_a_mean_residual(device: str) -> None:
    codec = codec_of("turbo2", 16)
    case = make_case(codec, device=device)
    keys, values = codec.decode(LAYER, {name: x.cpu() for name, x in case.context.packed.items()})
    columns = keys.shape[2]
    all_keys, all_values = case.all_keys.clone(), case.all_values.clone()
    all_keys[:, :, :columns], all_values[:, :, :columns] = keys.to(device), values.to(device)
    bare = replace(case, context=replace(case.context, rows={}), all_keys=all_keys, all_values=all_values)
    assert_close(attend(bare, codec), bare.expected())


@on_devices("preset", cpu=["turbo1"], gpu=["turbo3", "paper"])
def test_opcheck(device: str, preset: str) -> None:
    codec = codec_of(preset, 16)
    case = make_case(codec, columns=17, slots=1, masked=True, device=device)
    with RecordedCalls("attend_packed") as recorded:
        attend(case, codec)
    [arguments] = recorded.calls
    checks = torch.library.opcheck(torch.ops.esm_turbo.attend_packed.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


class _Layer(torch.nn.Module):
    """A projection before and after the attention, so that there is something to compile on both sides."""

    def __init__(self, case: Case, codec: KVCodec) -> None:
        super().__init__()
        self.case, self.codec = case, codec
        head_dim = case.query.shape[3]
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, head_dim, device=case.query.device))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        case = self.case
        output = triton_attention.extend_attention(
            query * self.scale, keys, values, case.mask, case.context, self.codec, LAYER
        )
        return output.transpose(1, 2).flatten(2) * 2


@on_devices("preset, slots", cpu=[("turbo1", 0), ("turbo1", 1)], gpu=itertools.product(("turbo3", "paper"), (0, 1)))
@torch.no_grad()
def test_compiles_as_one_graph(device: str, preset: str, slots: int) -> None:
    codec = codec_of(preset, 16)
    case = make_case(codec, columns=17, slots=slots, masked=True, device=device)
    layer = _Layer(case, codec)
    expected = layer(case.query, case.keys, case.values)
    torch._dynamo.reset()
    # Without a GPU only the graph is captured: compiling it for a CPU takes half a minute.
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    output = compiled(case.query, case.keys, case.values)
    assert_close(output, expected.double())


@on_devices("preset, shared", cpu=[("turbo3", False)], gpu=itertools.product(PRESETS, (False, True)))
@torch.no_grad()
def test_whole_model(device: str, preset: str, shared: bool, tiny_model: object) -> None:
    """Prefill, masked and ragged extensions and an append give the same with both backends on caches of equal bytes."""
    config = replace(TurboConfig.from_preset(preset), protect_special_tokens=True)
    models = [tiny_model(preset=config, heads=2).to(device) for _ in range(2)]
    for model, backend in zip(models, ("triton", "torch"), strict=True):
        model.esm.kv.backend = backend
    ids, mask = (x.to(device) for x in random_ids([21] if shared else [21, 9, 13], masks=1))
    new_ids, new_mask = (x.to(device) for x in random_ids([4, 2, 3], seed=1, cls=False))
    both = torch.ones(3, 21 + 4, dtype=torch.int64, device=device)
    both[:, 21:] = new_mask
    if not shared:
        both[:, :21] = mask
    both[:, [0, 2]] = torch.tensor([[0, 1], [1, 0], [1, 1]], device=device)
    # Encoded by PyTorch for both, because the backends' codes may differ.
    caches = [models[1](ids, mask, use_cache=True).past_key_values for _ in models]
    for given_mask in (None, new_mask, both):
        outputs = [m(new_ids, given_mask, past_key_values=c).logits for m, c in zip(models, caches, strict=True)]
        assert_close(outputs[0], outputs[1].double(), 2e-5)
    if not shared:
        for model, cache in zip(models, caches, strict=True):
            model(new_ids, new_mask, past_key_values=cache, use_cache=True)
        outputs = [m(new_ids, past_key_values=c).logits for m, c in zip(models, caches, strict=True)]
        # The appended tokens were computed with different backends, so a code may fall on the other side of a midpoint.
        assert_close(outputs[0], outputs[1].double(), 1e-2)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("keys", "must have one shape"),
        ("contexts", "need as many contexts, or one for all of them; got 2"),
        ("mask", "masks must be boolean"),
        ("visible", "masks must be boolean"),
    ],
)
def test_inputs_that_kernels_would_misread_are_refused(what: str, message: str) -> None:
    codec = codec_of("turbo3", 32)
    case = make_case(codec, n=2, masked=True, device="cpu")
    query, keys, values, mask, context = case.arguments
    assert mask is not None and context.mask is not None
    if what == "keys":
        keys = torch.cat([keys, keys], dim=2)
    elif what == "contexts":
        query, keys, values, mask = (torch.cat([x, x]) for x in (query, keys, values, mask))
    elif what == "mask":
        mask = mask.long()
    else:
        context = replace(context, visible=torch.ones(2, context.mask.shape[1], dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        triton_attention.extend_attention(query, keys, values, mask, context, codec, LAYER)


@pytest.mark.parametrize("columns", [0, 1, 31, 32, 64, 65, 200])
def test_masks_of_columns_as_bits(columns: int) -> None:
    mask = torch.rand(3, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    words = pack_mask(mask)
    assert words.dtype == torch.int32
    assert words.shape == (3, 2 * max(1, -(-columns // 64)))
    bits = (words.long()[..., None] >> torch.arange(32)) & 1
    assert torch.equal(bits.flatten(1)[:, :columns].bool(), mask)
    # Columns beyond the last one are not seen.
    assert not bits.flatten(1)[:, columns:].any()
