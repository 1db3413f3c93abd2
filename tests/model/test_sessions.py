"""Extensions of cached contexts, compared with an independent computation, and backends with each other."""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EsmConfig

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.codecs import ExactCodec, KVCodec, PackedContext
from esm_turbo.config import DEFAULT_PRESET, Geometry
from esm_turbo.ops import reference, torch_ops
from esm_turbo.ops.backends import KVBackend
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, EOS, MASK, assert_same_states, random_ids, rounding

pytestmark = pytest.mark.usefixtures("modes_only_watch")

LENGTHS = (1, 17, 63, 70, 1000)
ROUNDING = rounding(EsmConfig.from_pretrained(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def frozen() -> FrozenEsm2:
    return FrozenEsm2(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def exact() -> TurboEsm:
    return TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")


def assert_equal(ours: Tensor, independent: Tensor) -> None:
    """Float32 against float64: to rounding, absolute below 1 and relative above."""
    assert ours.shape == independent.shape
    error = (ours.double() - independent).abs() / independent.abs().clamp_min(1)
    assert error.max() <= ROUNDING


def residues(length: int, masks: int = 0, seed: int = 0, *, cls: bool = False) -> list[int]:
    ids, _ = random_ids([length], seed=seed, masks=masks, cls=cls)
    return ids[0].tolist()


@torch.no_grad()
def prefill(model: TurboEsmForMaskedLM, ids: list[int]) -> TurboKVCache:
    return model(torch.tensor([ids]), use_cache=True).past_key_values


@pytest.mark.parametrize("masks", [(0, 0), (3, 0), (0, 1), (4, 1)], ids=lambda m: f"{m[0]}+{m[1]} masks")
@pytest.mark.parametrize("n", [1, 5, 40])
def test_extension_is_the_frozen_computation(
    exact: TurboEsm, frozen: FrozenEsm2, n: int, masks: tuple[int, int]
) -> None:
    context_ids, new_ids = residues(60, masks[0], cls=True), residues(n, masks[1], seed=1)
    context = frozen.context(context_ids)
    expected = frozen.extend(context_ids, context, new_ids)
    with torch.no_grad():
        ours = exact.model(torch.tensor([context_ids]), use_cache=True, output_hidden_states=True)
        cache = ours.past_key_values
        output = exact.model(torch.tensor([new_ids]), past_key_values=cache, output_hidden_states=True)
    assert_equal(ours.hidden_states[-1][0], context.hidden_states[-1])
    for mine, theirs in zip(output.hidden_states[:-1], expected.hidden_states[:-1], strict=True):
        # Before the final norm a few components are twenty times larger than the rest.
        assert (mine[0] - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())
    assert_equal(output.hidden_states[-1][0], expected.hidden_states[-1])
    assert_equal(output.logits[0], expected.logits)
    assert cache.lengths.tolist() == [60]
    assert output.past_key_values is None


def test_ragged_batch(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """Contexts and extensions of different lengths, some with masks: each row as if it were alone."""
    contexts = [residues(40, 2, 1, cls=True), residues(7, 0, 2, cls=True), residues(23, 1, 3, cls=True)]
    news = [residues(3, 0, 4), residues(9, 2, 5), residues(1, 0, 6)]
    ids, mask = exact.codes.batch(contexts)
    new_ids, new_mask = exact.codes.batch(news)
    with torch.no_grad():
        cache = exact.model(ids, mask, use_cache=True).past_key_values
        output = exact.model(new_ids, new_mask, past_key_values=cache, output_hidden_states=True)
    assert cache.lengths.tolist() == [40, 7, 23]
    for row, (context_ids, new) in enumerate(zip(contexts, news, strict=True)):
        expected = frozen.extend(context_ids, frozen.context(context_ids), new)
        assert_equal(output.hidden_states[-1][row, : len(new)], expected.hidden_states[-1])
        assert_equal(output.logits[row, : len(new)], expected.logits)


@pytest.mark.parametrize("replaced", [(1,), (20,), (59,), (3, 30, 31)], ids=str)
def test_infix_replacement(exact: TurboEsm, frozen: FrozenEsm2, replaced: tuple[int, ...]) -> None:
    """Residues inside the context are hidden, and others run at their positions."""
    context_ids, new_ids = residues(60, 1, cls=True), residues(len(replaced), seed=1)
    # A hidden mask does not count for token dropout.
    context_ids[replaced[-1]] = MASK
    context = frozen.context(context_ids)
    expected = frozen.extend(context_ids, context, new_ids, positions=list(replaced), hidden=replaced)
    mask = torch.ones(1, 60 + len(replaced), dtype=torch.int64)
    mask[0, list(replaced)] = 0
    with torch.no_grad():
        output = exact.model(
            torch.tensor([new_ids]),
            mask,
            torch.tensor([replaced]),
            past_key_values=prefill(exact.model, context_ids),
            output_hidden_states=True,
        )
    assert_equal(output.hidden_states[-1][0], expected.hidden_states[-1])
    assert_equal(output.logits[0], expected.logits)


def test_leave_one_out_of_a_context_is_the_full_run(exact: TurboEsm) -> None:
    """A token that runs again at its own position sees what it saw at prefill: its state is that of the full run."""
    ids = torch.tensor([residues(30, 2, cls=True)])
    mask = torch.ones(30, 31, dtype=torch.int64)
    mask[torch.arange(30), torch.arange(30)] = 0
    with torch.no_grad():
        full = exact.model(ids, use_cache=True, output_hidden_states=True)
        one = exact.model(
            ids[0][:, None],
            mask,
            torch.arange(30)[:, None],
            past_key_values=full.past_key_values,
            output_hidden_states=True,
        )
    assert_same_states(one.hidden_states[-1][:, 0], full.hidden_states[-1][0], exact.model.config)
    assert_same_states(one.logits[:, 0], full.logits[0], exact.model.config)


def test_a_gap_stays_a_gap(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """Tokens appended with positions keep them, and the next ones follow the last."""
    context_ids, middle, last = residues(12, cls=True), residues(3, seed=1), residues(2, seed=2)
    context = frozen.context(context_ids)
    step = frozen.extend(context_ids, context, middle, positions=[50, 51, 52])
    kv = [
        (torch.cat([old[0], new[0]], 1), torch.cat([old[1], new[1]], 1))
        for old, new in zip(context.kv, step.kv, strict=True)
    ]
    expected = frozen.run(last, [53, 54], total_tokens=17, total_masks=0, past=kv)
    cache = prefill(exact.model, context_ids)
    with torch.no_grad():
        appended = exact.model(
            torch.tensor([middle]), None, torch.tensor([[50, 51, 52]]), past_key_values=cache, use_cache=True
        )
        output = exact.model(torch.tensor([last]), past_key_values=cache)
    assert cache.next_positions.tolist() == [53]
    assert_equal(appended.logits[0], step.logits)
    assert_equal(output.logits[0], expected.logits)


def test_shared_context_with_a_mask_per_row(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """A cache of one row serves four extensions, each of which hides other columns."""
    context_ids = residues(25, 1, cls=True)
    news = [residues(3, 0, seed) for seed in (1, 2, 3)] + [residues(3, 1, 4)]
    hidden = [(), (4,), (0, 24), tuple(range(1, 20))]
    mask = torch.ones(4, 28, dtype=torch.int64)
    for row, columns in enumerate(hidden):
        mask[row, list(columns)] = 0
    cache = prefill(exact.model, context_ids)
    before = [layer.packed["keys"].data_ptr() for layer in cache.layers]
    with torch.no_grad():
        output = exact.model(torch.tensor(news), mask, past_key_values=cache, output_hidden_states=True)
    context = frozen.context(context_ids)
    for row, (new, columns) in enumerate(zip(news, hidden, strict=True)):
        expected = frozen.extend(context_ids, context, new, hidden=columns)
        assert_equal(output.hidden_states[-1][row], expected.hidden_states[-1])
        assert_equal(output.logits[row], expected.logits)
    assert cache.batch_size == 1
    assert [layer.packed["keys"].data_ptr() for layer in cache.layers] == before


def test_appending_in_two_steps(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """The second step sees the frozen states of the first, not those of one larger step."""
    context_ids, first, second = residues(20, 1, cls=True), residues(4, 1, seed=1), residues(3, seed=2)
    context = frozen.context(context_ids)
    step = frozen.extend(context_ids, context, first)
    kv = [
        (torch.cat([old[0], new[0]], 1), torch.cat([old[1], new[1]], 1))
        for old, new in zip(context.kv, step.kv, strict=True)
    ]
    expected = frozen.run(second, [24, 25, 26], total_tokens=27, total_masks=2, past=kv)
    cache = prefill(exact.model, context_ids)
    with torch.no_grad():
        appended = exact.model(torch.tensor([first]), past_key_values=cache, use_cache=True)
        output = exact.model(torch.tensor([second]), past_key_values=cache)
        at_once = exact.model(torch.tensor([first + second]), past_key_values=prefill(exact.model, context_ids))
    assert appended.past_key_values is cache
    assert cache.lengths.tolist() == [24]
    assert_equal(appended.logits[0], step.logits)
    assert_equal(output.logits[0], expected.logits)
    assert (output.logits[0] - at_once.logits[0, 4:]).abs().max() > 1e-3


def test_append_mask_keeps_some(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """Ragged appends: each row keeps the tokens that `append_mask` names, in order."""
    contexts = [residues(9, 0, 1, cls=True), residues(14, 0, 2, cls=True)]
    new_ids = torch.tensor([residues(4, 0, 3), residues(4, 0, 4)])
    keep = torch.tensor([[False, True, True, False], [True, False, False, True]])
    ids, mask = exact.codes.batch(contexts)
    with torch.no_grad():
        cache = exact.model(ids, mask, use_cache=True).past_key_values
        exact.model(new_ids, past_key_values=cache, use_cache=True, append_mask=keep)
        probe = exact.model(torch.tensor([[7], [8]]), None, torch.tensor([[20], [20]]), past_key_values=cache)
    assert cache.lengths.tolist() == [11, 16]
    # Stored tokens keep the positions at which they were computed, and the next ones follow the last.
    assert cache.positions is not None
    assert [row[-2:] for row in (cache.positions[0, :11].tolist(), cache.positions[1, :16].tolist())] == [
        [10, 11],
        [14, 17],
    ]
    assert cache.next_positions.tolist() == [12, 18]
    for row, context_ids in enumerate(contexts):
        context = frozen.context(context_ids)
        step = frozen.extend(context_ids, context, new_ids[row].tolist())
        kept = keep[row].nonzero()[:, 0]
        kv = [
            (torch.cat([old[0], new[0][:, kept]], 1), torch.cat([old[1], new[1][:, kept]], 1))
            for old, new in zip(context.kv, step.kv, strict=True)
        ]
        total = len(context_ids) + 3
        expected = frozen.run([7 + row], [20], total_tokens=total, total_masks=0, past=kv)
        assert_equal(probe.logits[row], expected.logits)
        assert cache.token_ids[row, : total - 1].tolist() == context_ids + new_ids[row, kept].tolist()


def test_counts_of_a_larger_input(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    """`total_tokens` and `total_masks` make a context as part of a larger input, which the extension completes."""
    sequence = "MKTAYIAKQRQISFVKSHFSRQLEERLG"
    context_ids = [CLS, *exact.codes.encode(sequence, "it")]
    new = "<mask>LI<mask>V"
    new_ids = [*exact.codes.encode(new, "it"), EOS]
    context = frozen.context(context_ids, total_tokens=len(context_ids) + 6, total_masks=2)
    expected = frozen.extend(context_ids, context, new_ids)
    cache = exact.prefill(sequence, total_tokens=len(context_ids) + 6, total_masks=2)
    output = exact.extend(cache, new, refresh=0)
    assert_equal(output.hidden_states[0], expected.hidden_states[-1])
    assert_equal(output.logits[0], expected.logits)
    alone = frozen.extend(context_ids, frozen.context(context_ids), new_ids)
    assert (alone.logits - expected.logits).abs().max() > 1e-3


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("refresh", [0, 1, 8, 100])
def test_refresh(exact: TurboEsm, frozen: FrozenEsm2, refresh: int, eos: bool) -> None:
    """The last residues of each context run again with the new ones, except `<cls>`; the cache is not changed."""
    sequences = ["MKTAYIAKQRQISFVKSHFSRQL", "GAVL<mask>M"]
    news = ["EER", "L<mask>GLIE"]
    cache = exact.prefill(sequences)
    before = [layer.packed["keys"].clone() for layer in cache.layers]
    output = exact.extend(cache, news, eos=eos, refresh=refresh)
    for row, (sequence, new) in enumerate(zip(sequences, news, strict=True)):
        context_ids = [CLS, *exact.codes.encode(sequence, "it")]
        new_ids = exact.codes.encode(new, "it") + [EOS] * eos
        start = max(1, len(context_ids) - refresh)
        again = context_ids[start:]
        expected = frozen.extend(
            context_ids,
            frozen.context(context_ids),
            again + new_ids,
            positions=list(range(start, len(context_ids) + len(new_ids))),
            hidden=tuple(range(start, len(context_ids))),
        )
        n = len(new_ids)
        assert output.attention_mask[row].tolist() == [1] * n + [0] * (output.attention_mask.shape[1] - n)
        assert_equal(output.hidden_states[row, :n], expected.hidden_states[-1][len(again) :])
        assert_equal(output.logits[row, :n], expected.logits[len(again) :])
    assert output.logits.shape[1] == 6 + eos
    assert all(torch.equal(a, layer.packed["keys"]) for a, layer in zip(before, cache.layers, strict=True))
    assert cache.lengths.tolist() == [24, 7]


def test_extend_appends_residues_but_not_eos(exact: TurboEsm, frozen: FrozenEsm2) -> None:
    context_ids, new = [CLS, *exact.codes.encode("MKTAYIAKQRQ", "it")], "ISFVK"
    cache = exact.prefill("MKTAYIAKQRQ")
    exact.extend(cache, new, refresh=3, append=True)
    assert cache.lengths.tolist() == [17]
    assert cache.token_ids[0].tolist() == context_ids + exact.codes.encode(new, "it")
    new_ids = exact.codes.encode(new, "it")
    context = frozen.context(context_ids)
    step = frozen.extend(
        context_ids, context, [*context_ids[9:], *new_ids, EOS], positions=list(range(9, 18)), hidden=(9, 10, 11)
    )
    kv = [
        (torch.cat([old[0], new_kv[0][:, 3:8]], 1), torch.cat([old[1], new_kv[1][:, 3:8]], 1))
        for old, new_kv in zip(context.kv, step.kv, strict=True)
    ]
    expected = frozen.run([9], [17], total_tokens=18, total_masks=0, past=kv)
    with torch.no_grad():
        output = exact.model(torch.tensor([[9]]), past_key_values=cache)
    assert_equal(output.logits[0], expected.logits)


def test_positions_that_are_the_next_ones_are_not_stored(exact: TurboEsm) -> None:
    """`extend` passes positions even if they are the next ones."""
    cache, other = exact.prefill("MKTAYIAKQRQ"), exact.prefill("MKTAYIAKQRQ")
    exact.extend(cache, "ISF", append=True)
    with torch.no_grad():
        exact.model(torch.tensor([exact.codes.encode("ISF", "it")]), past_key_values=other, use_cache=True)
    assert cache.positions is None
    assert cache.nbytes == other.nbytes


def compressed_case(
    codec: KVCodec,
    batch: int,
    rows: int,
    n: int,
    columns: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    slots: int = 0,
    masked: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, PackedContext]:
    """Random arguments of `extend_attention`, except codec and layer."""
    geometry = codec.geometry
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads, head_dim = geometry.num_heads, geometry.head_dim
    query = normal(batch, heads, n, head_dim) * scale
    keys, values = normal(batch, heads, n, head_dim), normal(batch, heads, n, head_dim) * scale
    packed = codec.encode(0, normal(rows, heads, columns, head_dim), normal(rows, heads, columns, head_dim))
    protected, protected_mask = {}, None
    if slots:
        transformed = codec.transform(0, normal(rows, heads, slots, head_dim), normal(rows, heads, slots, head_dim))
        protected = {
            "keys": transformed[0].to(torch.bfloat16),
            "values": transformed[1].to(torch.bfloat16),
        }
        protected_mask = torch.rand(batch, slots, generator=generator) < 0.7
    past_mask = torch.rand(batch, columns, generator=generator) < 0.7 if masked else None
    mask = torch.rand(batch, n, generator=generator) < 0.7 if masked else None
    return query, keys, values, mask, PackedContext(packed, past_mask, protected, protected_mask)


@pytest.fixture(scope="module")
def codec(turbo: TurboEsm) -> KVCodec:
    return turbo.model.esm.codec(TurboConfig.from_preset(DEFAULT_PRESET))


def assert_backends_agree(codec: KVCodec, case: tuple[Tensor, Tensor, Tensor, Tensor | None, PackedContext]) -> Tensor:
    expected = reference.extend_attention(*case, codec, 0)
    output = torch_ops.extend_attention(*case, codec, 0)
    assert output.dtype == case[0].dtype
    assert torch.isfinite(output).all()
    size = expected.abs().amax().clamp_min(1e-30)
    assert ((output - expected).abs() / size).max() <= 1e-5
    return output


@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 3], ids=["shared", "own"])
@pytest.mark.parametrize("columns", LENGTHS)
def test_torch_backend_with_masks_sharing_and_protected_tokens(
    codec: KVCodec, columns: int, rows: int, slots: int
) -> None:
    for seed in range(3):
        assert_backends_agree(codec, compressed_case(codec, 3, rows, 4, columns, seed=seed, slots=slots))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e3, 1e18])
def test_huge_and_tiny_values(codec: KVCodec, scale: float) -> None:
    assert_backends_agree(codec, compressed_case(codec, 2, 2, 3, 33, scale=scale, slots=1))


@pytest.mark.parametrize("block", [16, 32, 100])
def test_blocks_of_any_size_give_the_same(codec: KVCodec, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = codec.geometry
    monkeypatch.setattr(torch_ops, "_SLICE_ELEMENTS", block * 2 * geometry.num_heads * geometry.head_dim)
    for columns in (block - 1, block, block + 1, 2 * block, 3 * block + 1):
        assert_backends_agree(codec, compressed_case(codec, 2, 2, 3, columns, slots=1))


def test_a_row_that_sees_nothing_is_zero(codec: KVCodec) -> None:
    query, keys, values, _, context = compressed_case(codec, 3, 3, 4, 20, slots=2)
    mask, past, protected = torch.ones(3, 4).bool(), torch.ones(3, 20).bool(), torch.ones(3, 2).bool()
    mask[1], past[1], protected[1] = False, False, False
    context = replace(context, mask=past, protected_mask=protected)
    output = assert_backends_agree(codec, (query, keys, values, mask, context))
    assert (output[1] == 0).all()
    assert (output[[0, 2]] != 0).all()


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    shared=st.booleans(),
    n=st.integers(1, 9),
    columns=st.integers(1, 40),
    slots=st.integers(0, 2),
    head_dim=st.sampled_from([8, 16, 24, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_exact_attention_is_one_softmax(
    batch: int, shared: bool, n: int, columns: int, slots: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    """With a lossless codec, the result is plain attention over context, protected and new tokens."""
    codec = ExactCodec(TurboConfig.from_preset("exact"), Geometry(1, 2, head_dim), {})
    rows = 1 if shared else batch
    query, keys, values, mask, context = compressed_case(codec, batch, rows, n, columns, seed=seed, slots=slots)
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    output = torch_ops.extend_attention(query, keys, values, mask, context, codec, 0)
    assert output.dtype == dtype
    sides = [(context.packed, context.mask), ({"keys": keys, "values": values}, mask)]
    if slots:
        sides.insert(1, (context.protected, context.protected_mask))
    all_keys, all_values = (
        torch.cat([side[name].double().expand(batch, -1, -1, -1) for side, _ in sides], dim=2)
        for name in ("keys", "values")
    )
    seen = torch.cat([side_mask for _, side_mask in sides], dim=1)
    scores = query.double() @ all_keys.transpose(2, 3)
    weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1).nan_to_num(0.0)
    expected = weights @ all_values
    assert (output.double() - expected).abs().max() <= (2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shared", [True, False])
def test_backends_agree_through_the_model(tiny_model: object, cache_config: TurboConfig, shared: bool) -> None:
    """The whole model with either backend on the same cache: ragged, with and without masks."""
    fast, slow = (tiny_model(preset=cache_config, calibrated=True, backend=name) for name in ("torch", "reference"))
    ids, mask = random_ids([21] if shared else [21, 5, 13], masks=1)
    new_ids, new_mask = random_ids([4, 2, 3], seed=1, cls=False)
    both = torch.ones(3, 21 + 4, dtype=torch.int64)
    both[:, 21:] = new_mask
    if not shared:
        both[:, :21] = mask
    both[:, [0, 2]] = torch.tensor([[0, 1], [1, 0], [1, 1]])
    with torch.no_grad():
        cache = fast(ids, mask, use_cache=True).past_key_values
        for given_mask in (None, new_mask, both):
            outputs = [model(new_ids, given_mask, past_key_values=cache).logits for model in (fast, slow)]
            assert torch.isfinite(outputs[0]).all()
            assert (outputs[0] - outputs[1]).abs().max() <= 5e-5


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_name_their_contexts(tiny_model: object, cache_config: TurboConfig, backend: str, masked: bool) -> None:
    """Rows in any order give what each context gives its own rows: positions, masks and token dropout included."""
    model = tiny_model(preset=cache_config, calibrated=True, backend=backend)
    contexts, index = [21, 5, 13], [2, 0, 2, 1, 0]
    new_ids, new_mask = random_ids([4, 2, 3, 4, 1], seed=1, masks=1, cls=False)
    with torch.no_grad():
        cache = model(*random_ids(contexts, masks=1), use_cache=True).past_key_values
        before = cache.nbytes
        both = torch.cat([cache.valid()[index].long(), new_mask], dim=1)
        both[:, [1, 2]] = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0], [1, 0]])
        mask = both if masked else new_mask
        found = model(new_ids, mask, past_key_values=cache, context_index=index, output_hidden_states=True)
        for row, context in enumerate(index):
            length, n = contexts[context], int(new_mask[row].sum())
            own = torch.cat([both[row : row + 1, :length], new_mask[row : row + 1, :n]], dim=1) if masked else None
            expected = model(
                new_ids[row : row + 1, :n],
                own,
                past_key_values=cache.select(context),
                output_hidden_states=True,
            )
            # The tolerance between backends.
            assert (found.logits[row, :n] - expected.logits[0]).abs().max() <= 5e-5
            for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                assert (ours[row, :n] - theirs[0]).abs().max() <= 5e-5
    assert (cache.nbytes, cache.lengths.tolist(), found.past_key_values) == (before, contexts, None)


def test_rows_name_contexts_with_gaps_in_positions(exact: TurboEsm) -> None:
    """New tokens follow the last position of the context that they name; one context alone may be named, too."""
    with torch.no_grad():
        caches = [prefill(exact.model, residues(length, cls=True)) for length in (12, 20)]
        middle = torch.tensor([residues(3, seed=1)])
        exact.model(middle, None, torch.tensor([[50, 51, 52]]), past_key_values=caches[0], use_cache=True)
        new_ids = torch.tensor([residues(2, seed=2)] * 3)
        found = exact.model(new_ids, past_key_values=TurboKVCache.cat(caches), context_index=torch.tensor([1, 0, 1]))
        alone = exact.model(new_ids, past_key_values=caches[0], context_index=[0, 0, 0])
        for row, context in ((0, 1), (1, 0), (2, 1)):
            expected = exact.model(new_ids[:1], past_key_values=caches[context]).logits[0]
            assert_same_states(found.logits[row], expected, exact.model.config)
    assert_same_states(alone.logits[2], found.logits[1], exact.model.config)


def test_rows_of_padding_are_finite(tiny_model: object, cache_config: TurboConfig) -> None:
    model = tiny_model(preset=cache_config, calibrated=True)
    ids, mask = random_ids([9, 9])
    new_ids, new_mask = random_ids([3, 3], seed=1, cls=False)
    new_mask[1] = 0
    both = torch.cat([mask, new_mask], dim=1)
    both[1] = 0
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values
        padded = model(new_ids, new_mask, past_key_values=cache).logits
        assert torch.isfinite(padded).all()
        assert cache.lengths.tolist() == [9, 9]
        model(new_ids, new_mask, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [12, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_extension(tiny_model: object, cache_config: TurboConfig, dtype: torch.dtype) -> None:
    """Error relative to float32 with the same rounded weights: at most twice that of the plain model in that dtype."""
    model = tiny_model(preset=cache_config, calibrated=True).to(dtype)
    double = tiny_model(preset=cache_config, calibrated=True).to(dtype).float()
    ids, _ = random_ids([30])
    with torch.no_grad():
        caches = [m(ids[:, :20], use_cache=True).past_key_values for m in (model, double)]
        extended = [m(ids[:, 20:], past_key_values=c).logits for m, c in zip((model, double), caches, strict=True)]
        plain = [m(ids).logits[:, 20:] for m in (model, double)]
    assert extended[0].dtype == dtype
    size = plain[1].square().mean().sqrt()
    error, allowed = ((pair[0].float() - pair[1]).square().mean().sqrt() / size for pair in (extended, plain))
    # Codes that flip at a boundary add to the rounding errors.
    flips = 0.0 if cache_config.codec == "exact" else 0.05
    assert error <= 2 * allowed + flips


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(tiny_model: object, cache_config: TurboConfig, dtype: torch.dtype, device: str) -> None:
    """Prefill, extension and appends are as accurate as a plain forward; a context is of one precision."""
    model = tiny_model(preset=cache_config, calibrated=True).to(device)
    ids = random_ids([30])[0].to(device)
    size = model(ids).logits[:, 24:].square().mean().sqrt()

    def appended(context: bool, appends: bool) -> tuple[Tensor, TurboKVCache]:
        with torch.autocast(device, dtype=dtype, enabled=context):
            cache = model(ids[:, :20], use_cache=True).past_key_values
        with torch.autocast(device, dtype=dtype, enabled=appends):
            model(ids[:, 20:24], past_key_values=cache, use_cache=True)
            return model(ids[:, 24:], past_key_values=cache).logits.float(), cache

    expected, _ = appended(False, False)
    with torch.autocast(device, dtype=dtype):
        rounded = model(ids).logits.float()
    allowed = (rounded - model(ids).logits).square().mean().sqrt() / size
    flips = 0.0 if cache_config.codec == "exact" else 0.05
    logits, cache = appended(True, True)
    error = (logits - expected).square().mean().sqrt() / size
    assert error <= 2 * allowed + flips
    assert cache.get_seq_length() == 24
    for inside in ((True, False), (False, True)):
        with pytest.raises(ValueError, match="it was made in float32"):
            appended(*inside)


@torch.no_grad()
def test_tables_of_a_codec_are_exact_under_autocast(tiny_model: object, cache_config: TurboConfig) -> None:
    """They are kept for later calls, as are digests of weights."""
    ids = random_ids([12])[0]
    states = []
    for inside in (False, True):
        model = copy.deepcopy(tiny_model(preset=cache_config, calibrated=True))
        if model.esm.calibration is not None:
            model.esm.kv.calibration = copy.deepcopy(model.esm.calibration)
            for codec in model.esm.calibration._codecs.values():
                codec._on_device.clear()
        with torch.autocast("cpu", enabled=inside):
            cache = model(ids, use_cache=True).past_key_values
            states.append((cache.codec.layer_state(1, torch.device("cpu")), cache.identity.weights))
    assert states[0][0].keys() == states[1][0].keys()
    assert all(torch.equal(x, states[1][0][name]) for name, x in states[0][0].items())
    assert states[0][1] == states[1][1]


@torch.no_grad()
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_a_cache_is_appended_to_in_its_own_dtype(
    tiny_model: object, cache_config: TurboConfig, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    first, second = (tiny_model(preset=cache_config, calibrated=True).to(dtype) for dtype in dtypes)
    ids = random_ids([30])[0]
    cache = first(ids[:, :20], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="belongs to another model: it was made in"):
        second(ids[:, 20:24], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 20


class _LargestTensor(TorchDispatchMode):
    """Records the most bytes that an operation allocates for its outputs; views of inputs are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        flat = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in flat}
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return output


@pytest.mark.parametrize(("batch", "shared"), [(1, False), (6, True), (2, False)])
def test_no_dense_copy_of_the_cache(tiny_model: object, cache_config: TurboConfig, batch: int, shared: bool) -> None:
    """An extension allocates slices only, whatever the length: far less than one layer's dense keys."""
    head_dim, heads, length = 64, 4, 4096
    model = tiny_model(preset=cache_config, calibrated=True, head_dim=head_dim, heads=heads, layers=1)
    dense = 4 * heads * head_dim * length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (1 if shared else batch, length), generator=generator)
    new_ids = torch.randint(4, 24, (batch, 8), generator=generator)
    cache = long_cache(model, ids)
    mask = torch.ones(batch, length + 8, dtype=torch.int64)
    mask[:, 5] = 0
    with torch.no_grad(), _LargestTensor() as watched:
        output = model(new_ids, mask, past_key_values=cache)
    assert torch.isfinite(output.logits).all()
    # Indices into look-up tables are the largest tensors: eight bytes per element.
    assert watched.largest <= 8 * torch_ops._SLICE_ELEMENTS
    assert watched.largest <= dense / 4 + mask.nbytes
    with torch.no_grad(), _LargestTensor() as dense_read:
        cache.codec.decode(0, cache.layers[0].packed)
    assert dense_read.largest >= dense or cache_config.codec == "exact"


@torch.no_grad()
def long_cache(model: TurboEsmForMaskedLM, ids: Tensor) -> TurboKVCache:
    """A long context, written in pieces, since its content does not matter."""
    cache = model(ids[:, :512], use_cache=True).past_key_values
    for piece in ids[:, 512:].split(512, dim=1):
        model(piece, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("step", ["prefill", "append"])
def test_a_write_holds_the_dense_keys_of_one_layer_only(
    tiny_model: object, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a layer's keys and values arrive, those of earlier layers are freed: only codes are kept."""
    model = tiny_model(preset=DEFAULT_PRESET, layers=3)
    ids, mask = random_ids([40, 33])
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values if step == "append" else model.new_cache()
    dense: list[weakref.ref[Tensor]] = []
    stage = TurboKVCache.stage

    def watched(
        self: TurboKVCache, plan: object, layer_idx: int, keys: Tensor, values: Tensor, backend: KVBackend
    ) -> None:
        assert [x for x in dense if x() is not None] == []
        dense.extend((weakref.ref(keys), weakref.ref(values)))
        stage(self, plan, layer_idx, keys, values, backend)

    monkeypatch.setattr(TurboKVCache, "stage", watched)
    with torch.no_grad():
        model(ids, mask, past_key_values=cache, use_cache=True)
    assert len(dense) == 6
    for layer in cache.layers:
        assert all(tensor.dtype == torch.uint8 for tensor in layer.packed.values())
    assert cache.nbytes < 0.25 * 4 * cache.geometry.elements_per_token * int(cache.lengths.sum())
