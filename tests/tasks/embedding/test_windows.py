"""Windows of long proteins, against an independent model in float64."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esm_turbo import TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.proteins.limits import LongProteinWarning
from esm_turbo.tasks.embedding.windows import Windows, embed_in_windows, iter_windows
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.models import CLS, EOS, MASK, default_dtype, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]


LETTERS = "LAGVSERTIDPKQNFYMHWC"


# float32 against float64 over two layers; states are of order one.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def protein(length: int, seed: int = 0) -> str:
    return "".join(LETTERS[i - 4] for i in random_ids([length], seed=seed, cls=False)[0][0])


def make_turbo(turbo: TurboEsm, model: TurboEsmForMaskedLM) -> TurboEsm:
    return TurboEsm(model, turbo.tokenizer)


def oracle(tiny_frozen: FrozenEsm2, ids: list[int], cut: Windows) -> Tensor:
    """Hidden states of the residues of every layer, [layers + 1, n, hidden]; no keys or values are dropped."""
    totals = {"total_tokens": len(ids) + 2, "total_masks": ids.count(MASK)}
    layers = tiny_frozen.num_layers
    past: list[list[Tensor]] = []
    done = torch.zeros(layers + 1, len(ids), len(tiny_frozen.weights["lm_head.dense.bias"]), dtype=torch.float64)
    spans, kept = cut.spans(len(ids)), cut.kept(len(ids))
    for number, ((start, end), (first, stop)) in enumerate(zip(spans, kept, strict=True)):
        seen = min(cut.memory, start)
        tokens = [CLS, *ids[start:end], *([EOS] if end == len(ids) else [])]
        # <cls> is position 0 of a whole protein, so residue i has position i + 1.
        positions = [start - seen, *range(start + 1, start + len(tokens))]
        visible = [(k[:, start - seen : start], v[:, start - seen : start]) for k, v in past]
        run = tiny_frozen.run(tokens, positions, past=visible if seen else None, **totals)
        states = torch.stack(run.hidden_states)
        done[:, first:stop] = states[:, 1 + first - start : 1 + stop - start]
        if number + 1 < len(spans):
            new = spans[number + 1][0] - start
            parts = [[x[:, 1 : 1 + new] for x in kv] for kv in run.kv]
            past = [_concatenated(*layer) for layer in zip(past, parts, strict=True)] if past else parts
    return done


def _concatenated(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    return [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_residue_comes_from_one_window(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 60))
    cut = Windows(window, data.draw(st.integers(0, window - 1)), data.draw(st.sampled_from([0, 5])))
    length = data.draw(st.integers(1, 500))
    spans, kept = cut.spans(length), cut.kept(length)
    assert len(spans) == len(kept)
    assert [i for first, stop in kept for i in range(first, stop)] == list(range(length))
    assert all(start <= first < stop <= end for (start, end), (first, stop) in zip(spans, kept, strict=True))
    assert (spans[0][0], spans[-1][1]) == (0, length)
    assert all(end - start == min(window, length) for start, end in spans)
    assert all(end - start >= cut.overlap for (_, end), (start, _) in pairwise(spans))
    # No more windows than the overlap requires.
    assert len(spans) == max(1, -(-(length - cut.overlap) // (window - cut.overlap)))


def test_the_window_that_gives_shared_residues() -> None:
    assert Windows(10, 4, 0).spans(16) == Windows(10, 4, 8).spans(16) == [(0, 10), (6, 16)]
    assert Windows(10, 4, 0).kept(16) == [(0, 8), (8, 16)]
    assert Windows(10, 4, 8).kept(16) == [(0, 6), (6, 16)]


def test_defaults() -> None:
    assert Windows.of(None) is None
    assert Windows.of(100) == Windows(100, 25, 100)
    assert Windows.of(1000) == Windows(1000, 64, 1000)
    assert Windows.of(None, memory=0) == Windows(511, 64, 0)
    assert Windows.of(None, 8).reach == 1022


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "`window` must be an integer of at least 1, got 0"),
        ({"window": 8.0}, "`window` must be an integer of at least 1, got 8.0"),
        ({"window": True}, "got True"),
        ({"window": 8, "overlap": 8}, r"`overlap` must be smaller than `window` \(8\), got 8"),
        ({"overlap": -1}, "`overlap` must be an integer of at least 0, got -1"),
        ({"window": 8, "memory": -2}, "`memory` must be an integer of at least 0, got -2"),
        ({"memory": "all"}, "`memory` must be an integer of at least 0, got 'all'"),
    ],
)
def test_invalid_numbers(turbo: TurboEsm, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turbo.embed("MKTAY", **options)


@pytest.mark.parametrize("memory", [0, 7, 40, 64, 500])
@pytest.mark.parametrize(("length", "masks"), [(33, 0), (41, 3), (200, 11)])
def test_against_an_independent_model(
    exact: TurboEsm, tiny_frozen: FrozenEsm2, memory: int, length: int, masks: int
) -> None:
    ids = random_ids([length], masks=masks, cls=False)[0][0].tolist()
    cut = Windows(32, 8, memory)
    found = embed_in_windows(exact, ids, cut, (0, 1, 2), frozenset(["mean", "per_tok", "bos"]))
    expected = oracle(tiny_frozen, ids, cut).float()
    for layer in range(3):
        torch.testing.assert_close(found["representations"][layer], expected[layer], **TOLERANCE)
        torch.testing.assert_close(found["mean_representations"][layer], expected[layer].mean(0), **TOLERANCE)
    start = tiny_frozen.run([CLS, *ids[:32]], list(range(33)), total_tokens=length + 2, total_masks=masks)
    torch.testing.assert_close(found["bos_representations"][2], start.hidden_states[2][0].float(), **TOLERANCE)


def test_the_independent_model_sees_what_it_should(tiny_frozen: FrozenEsm2) -> None:
    """Memory, overlap and masks all change the result by more than the tolerance."""
    ids = random_ids([100], masks=5, cls=False)[0][0].tolist()
    right = oracle(tiny_frozen, ids, Windows(32, 8, 40))
    for other in (Windows(32, 8, 39), Windows(32, 8, 0), Windows(32, 14, 40)):
        assert (oracle(tiny_frozen, ids, other)[-1] - right[-1]).abs().max() > 5e-3


@pytest.mark.slow
def test_35000_residues(exact: TurboEsm, tiny_frozen: FrozenEsm2) -> None:
    """Titin's size. Positions run on to 35,000, where float32 angles are off by up to 0.002."""
    ids = random_ids([35_000], cls=False)[0][0].tolist()
    cut = Windows(256, 32, 128)
    found = embed_in_windows(exact, ids, cut, (2,), frozenset(["mean", "per_tok"]))
    expected = oracle(tiny_frozen, ids, cut)[-1].float()
    torch.testing.assert_close(found["representations"][2], expected, rtol=0, atol=0.02)
    torch.testing.assert_close(found["mean_representations"][2], expected.mean(0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("preset", PRODUCT_PRESETS)
def test_dropping_unreachable_columns_changes_nothing(
    turbo: TurboEsm, tiny_model: MakeModel, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_turbo(turbo, tiny_model(preset=preset))
    ids = random_ids([700], cls=False)[0][0].tolist()
    columns = []

    def states() -> Tensor:
        return torch.cat([x[2] for _, x, _ in iter_windows(tiny, ids, Windows(64, 16, 100), (2,))])

    drop = TurboKVCache.drop_front

    def counting(cache: TurboKVCache, tokens: int) -> None:
        drop(cache, tokens)
        columns.append(cache.columns)

    monkeypatch.setattr(TurboKVCache, "drop_front", counting)
    dropping = states()
    monkeypatch.setattr(TurboKVCache, "drop_front", lambda cache, tokens: None)
    keeping = states()
    # Angles are rounded differently, which may move a code across a boundary; with one bit that matters.
    off = ((dropping - keeping).square().mean() / keeping.square().mean()).sqrt()
    assert off < (1e-5 if preset == "exact" else 2e-3)
    assert len(columns) > 10
    assert max(columns) < 101 + 64
    assert min(columns[3:]) >= 101


def test_memory_does_not_grow_with_the_protein() -> None:
    script = """
        import sys, torch
        sys.path.insert(0, "tests")
        from tests.helpers.models import CLS, make_esm, random_ids
        from benchmarks.harness.measure import peak_resident
        from esm_turbo import TurboEsm, TurboEsmForMaskedLM
        from esm_turbo.tasks.embedding.windows import Windows, embed_in_windows
        tokenizer = TurboEsm.from_pretrained(device="cpu").tokenizer
        model = TurboEsmForMaskedLM.from_esm(make_esm(head_dim=64), preset="exact")
        tiny = TurboEsm(model, tokenizer)
        for length in (2000, 16000):
            ids = random_ids([length], cls=False)[0][0].tolist()
            embed_in_windows(tiny, ids, Windows(256, 32, 256), (2,), frozenset(["mean"]))
            print(peak_resident())
    """
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    short, long = map(int, done.stdout.split())
    # Keys and values of all 16,000 would take 65 MB, one layer's scores 4 GB.
    assert long - short < 30e6


def test_the_default_dtype_changes_nothing(turbo: TurboEsm) -> None:
    sequence, include = protein(50), ["mean", "per_tok"]
    (expected,) = turbo.embed(sequence, include=include, window=20, overlap=5)
    with default_dtype(torch.bfloat16):
        (found,) = turbo.embed(sequence, include=include, window=20, overlap=5)
    for name in ("mean_representations", "representations"):
        for layer, states in getattr(expected, name).items():
            torch.testing.assert_close(getattr(found, name)[layer], states, rtol=0, atol=1e-5)


def test_embed_splits_only_long_proteins(turbo: TurboEsm, exact: TurboEsm) -> None:
    sequences = [protein(90), "MKTAY", protein(64, 1), protein(65, 2)]
    found = exact.embed(sequences, (0, -1), ("mean", "per_tok", "bos"), window=64, overlap=16, memory=32)
    whole = exact.embed(sequences, (0, -1), ("mean", "per_tok", "bos"))
    cut = Windows(64, 16, 32)
    for index, (a, b) in enumerate(zip(found, whole, strict=True)):
        if index in (1, 2):
            torch.testing.assert_close(a.tensors(), b.tensors(), rtol=1e-4, atol=2e-5)
            continue
        ids = exact.codes.encode(sequences[index], "it")
        parts = embed_in_windows(exact, ids, cut, (0, 2), frozenset(["mean", "per_tok", "bos"]))
        torch.testing.assert_close(a.representations, parts["representations"], rtol=0, atol=0)
        torch.testing.assert_close(a.mean_representations, parts["mean_representations"], rtol=0, atol=0)
        torch.testing.assert_close(a.bos_representations, parts["bos_representations"], rtol=0, atol=0)
        # The input of the first layer is exact with any windows; the output of the last is not.
        torch.testing.assert_close(a.representations[0], b.representations[0], rtol=1e-5, atol=1e-5)
        assert (a.representations[2] - b.representations[2]).abs().max() > 1e-3
        assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in a.tensors().values())


def test_half_precision(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    sequence = protein(150)
    options = {"include": ["per_tok"], "window": 64, "overlap": 16, "memory": 64}
    [half] = make_turbo(turbo, tiny_model().bfloat16()).embed(sequence, **options)
    [whole] = make_turbo(turbo, tiny_model()).embed(sequence, **options)
    assert half.representations[2].dtype == torch.float32
    # Eight bits of mantissa through two layers; states are of order one.
    torch.testing.assert_close(half.representations[2], whole.representations[2], rtol=0, atol=0.3)


@pytest.mark.parametrize("item", ["contacts", "cache"])
def test_results_not_available_in_windows(exact: TurboEsm, item: str) -> None:
    with pytest.raises(ValueError, match=f"window by window.*{item}"):
        exact.embed("MKTAY", include=["mean", item], window=64)
    with pytest.raises(ValueError, match="cache"):
        exact.embed("MKTAY", return_cache=True, window=64)


def test_a_memory_needs_a_calibration(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    model = tiny_model()
    model.set_turbo(preset="turbo3")
    uncalibrated = make_turbo(turbo, model)
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        uncalibrated.embed(protein(90), window=64)
    [found] = uncalibrated.embed(protein(90), window=64, memory=0)
    assert found.is_finite()


def test_a_long_reach_warns(exact: TurboEsm) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact.embed(protein(1500), include="mean", window=511)
    with pytest.warns(LongProteinWarning, match="of up to 1200 residues"):
        exact.embed(protein(1500), include="mean", window=700, memory=500)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["exact", "turbo3"])
def test_on_a_device(turbo: TurboEsm, tiny_model: MakeModel, preset: str) -> None:
    sequences = [protein(700), "MKTAY", protein(90, 1)]
    options = {"include": ["mean", "per_tok", "bos"], "window": 64, "overlap": 16, "memory": 100}
    expected = make_turbo(turbo, tiny_model(preset=preset)).embed(sequences, **options)
    found = make_turbo(turbo, tiny_model(preset=preset).to("cuda")).embed(sequences, **options)
    for mine, theirs in zip(found, expected, strict=True):
        for name, tensor in mine.tensors().items():
            assert tensor.device.type == "cpu"
            off = (tensor - theirs.tensors()[name]).square().mean() / theirs.tensors()[name].square().mean()
            assert off.sqrt() < 0.01
