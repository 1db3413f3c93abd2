"""Extensions of cached contexts, compared with an independent computation, and backends with each other."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EsmConfig

from esm_turbo import TurboConfig, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.ops import torch_ops
from esm_turbo.ops.backends import KVBackend
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, EOS, MASK, assert_same_states, random_ids, relative_error, rounding

pytestmark = pytest.mark.usefixtures("modes_only_watch")

LENGTHS = (1, 17, 63, 70, 1000)
ROUNDING = rounding(EsmConfig.from_pretrained(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def frozen() -> FrozenEsm2:
    return FrozenEsm2(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def exact() -> TurboEsm:
    return TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def exact_on_device(request: pytest.FixtureRequest) -> TurboEsm:
    return TurboEsm.from_pretrained(preset="exact", calibration=False, device=request.param, dtype="float32")


def assert_equal(ours: Tensor, independent: Tensor) -> None:
    """Float32 against float64: to rounding, absolute below 1 and relative above."""
    assert ours.shape == independent.shape
    error = (ours.cpu().double() - independent).abs() / independent.abs().clamp_min(1)
    assert error.max() <= ROUNDING


def residues(length: int, masks: int = 0, seed: int = 0, *, cls: bool = False) -> list[int]:
    ids, _ = random_ids([length], seed=seed, masks=masks, cls=cls)
    return ids[0].tolist()


@torch.no_grad()
def prefill(model: TurboEsmForMaskedLM, ids: list[int]) -> TurboKVCache:
    return model(torch.tensor([ids]), use_cache=True).past_key_values


@dataclass
class Row:
    """What a row has stored, by the independent computation."""

    ids: list[int]
    positions: list[int]
    kv: list[tuple[Tensor, Tensor]]

    def seen(self, columns: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [(keys[:, columns], values[:, columns]) for keys, values in self.kv]


@dataclass(frozen=True)
class Step:
    """New tokens of each row: at these positions or at its next ones, some columns hidden, and some tokens stored."""

    new: list[list[int]]
    positions: list[list[int]] | None = None
    hidden: list[tuple[int, ...]] | None = None
    keep: list[list[int]] | None = None


CASES: dict[str, tuple[list[list[int]], list[Step]]] = {
    **{
        f"{n} new tokens, {masks[0]}+{masks[1]} masks": (
            [residues(60, masks[0], cls=True)],
            [Step([residues(n, masks[1], seed=1)])],
        )
        for n, masks in ((1, (0, 0)), (1, (4, 0)), (5, (3, 1)), (40, (0, 0)), (40, (4, 1)))
    },
    "ragged": (
        [residues(40, 2, 1, cls=True), residues(7, 0, 2, cls=True), residues(23, 1, 3, cls=True)],
        [Step([residues(3, 0, 4), residues(9, 2, 5), residues(1, 0, 6)])],
    ),
    # Residues inside the context, of which one is a mask that no longer counts, are hidden, and others run there.
    **{
        f"in place of {replaced}": (
            [[MASK if column == replaced[-1] else x for column, x in enumerate(residues(60, 1, cls=True))]],
            [Step([residues(len(replaced), seed=1)], [list(replaced)], [replaced])],
        )
        for replaced in ((1,), (20,), (59,), (3, 30, 31))
    },
    # Tokens appended with positions keep them, and the next ones follow the last.
    "a gap": (
        [residues(12, cls=True)],
        [Step([residues(3, seed=1)], [[50, 51, 52]], keep=[[0, 1, 2]]), Step([residues(2, seed=2)])],
    ),
    "a context of all rows, a mask of each": (
        [residues(25, 1, cls=True)],
        [
            Step(
                [*(residues(3, 0, seed) for seed in (1, 2, 3)), residues(3, 1, 4)],
                hidden=[(), (4,), (0, 24), tuple(range(1, 20))],
            )
        ],
    ),
    # The second step sees the frozen states of the first.
    "two steps": (
        [residues(20, 1, cls=True)],
        [Step([residues(4, 1, seed=1)], keep=[[0, 1, 2, 3]]), Step([residues(3, seed=2)])],
    ),
    # Each row keeps others, at the positions at which they were computed.
    "some tokens are kept": (
        [residues(9, 0, 1, cls=True), residues(14, 0, 2, cls=True)],
        [
            Step([residues(4, 0, 3), residues(4, 0, 4)], keep=[[1, 2], [0, 3]]),
            Step([[7], [8]], [[20], [20]]),
            Step([residues(2, 1, 5)] * 2, keep=[[0, 1], [0]]),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_extensions_are_the_frozen_computation(exact_on_device: TurboEsm, frozen: FrozenEsm2, case: str) -> None:
    """Step by step, each row as if it were alone; what is not appended leaves the cache as it is."""
    contexts, steps = CASES[case]
    exact, device = exact_on_device, exact_on_device.model.device
    ids, mask = (x.to(device) for x in exact.codes.batch(contexts))
    prefilled = exact.model(ids, mask, use_cache=True, output_hidden_states=True)
    cache, rows = prefilled.past_key_values, []
    for index, context in enumerate(contexts):
        run = frozen.context(context)
        assert_equal(prefilled.hidden_states[-1][index, : len(context)], run.hidden_states[-1])
        rows.append(Row([*context], [*range(len(context))], run.kv))
    for step in steps:
        new_ids, given = exact.codes.batch(step.new)
        keep = torch.zeros_like(given, dtype=torch.bool)
        if step.hidden is not None:
            past = cache.valid().long().cpu().repeat(len(step.new) // len(rows), 1)
            for index, columns in enumerate(step.hidden):
                past[index, list(columns)] = 0
            given = torch.cat([past, given], dim=1)
        for index, kept in enumerate(step.keep or ()):
            keep[index, kept] = True
        output = exact.model(
            new_ids.to(device),
            given.to(device),
            None if step.positions is None else torch.tensor(step.positions, device=device),
            past_key_values=cache,
            use_cache=step.keep is not None,
            append_mask=None if step.keep is None else keep.to(device),
            output_hidden_states=True,
        )
        assert output.past_key_values is (None if step.keep is None else cache)
        for index, new in enumerate(step.new):
            row = rows[index % len(rows)]
            positions = range(max(row.positions) + 1, max(row.positions) + 1 + len(new))
            positions = [*positions] if step.positions is None else step.positions[index]
            hidden = () if step.hidden is None else step.hidden[index]
            seen = [column for column in range(len(row.ids)) if column not in hidden]
            every = [row.ids[column] for column in seen] + new
            expected = frozen.run(
                new, positions, total_tokens=len(every), total_masks=every.count(MASK), past=row.seen(seen)
            )
            for mine, theirs in zip(output.hidden_states[:-1], expected.hidden_states[:-1], strict=True):
                # Before the final norm a few components are twenty times larger than the rest.
                assert (mine[index, : len(new)].cpu() - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())
            assert_equal(output.hidden_states[-1][index, : len(new)], expected.hidden_states[-1])
            assert_equal(output.logits[index, : len(new)], expected.logits)
            if step.keep is not None:
                kept = step.keep[index]
                row.ids += [new[i] for i in kept]
                row.positions += [positions[i] for i in kept]
                row.kv = [
                    (torch.cat([old[0], own[0][:, kept]], 1), torch.cat([old[1], own[1][:, kept]], 1))
                    for old, own in zip(row.kv, expected.kv, strict=True)
                ]
        assert cache.lengths.tolist() == [len(row.ids) for row in rows]
        assert cache.next_positions.tolist() == [max(row.positions) + 1 for row in rows]
        for index, row in enumerate(rows):
            assert cache.token_ids[index, : len(row.ids)].tolist() == row.ids
            if cache.positions is not None:
                assert cache.positions[index, : len(row.ids)].tolist() == row.positions


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


@torch.no_grad()
def test_protected_tokens_are_read_from_their_copies_alone(tiny_model: object) -> None:
    """A context of these is nearly exact, although its codes have one bit."""
    presets, new = (TurboConfig(bits=1, protect_special_tokens=True), "exact"), torch.tensor([[5, 6, 7]])
    found, expected = (
        model(new, past_key_values=model(torch.tensor([[CLS, EOS]]), use_cache=True).past_key_values).logits
        for model in (tiny_model(preset=preset) for preset in presets)
    )
    assert relative_error(found, expected) < 2**-6


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
        # The first call compares the model with the library's forward.
        filled = model(ids, mask, use_cache=True).past_key_values
    cache = filled if step == "append" else model.new_cache()
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
