"""Calibration of a family with exact contexts: of what is stored of homologs, as the sequences after them read it."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from esm_turbo import KVCalibrator, TurboEsm
from esm_turbo.codecs.fitting.statistics import KEY_BLOCK
from esm_turbo.model import collectors, padding
from esm_turbo.model.collectors import LayerStates, Proteins
from esm_turbo.model.sensitivity import SensitivityCollector
from tests.helpers.e1 import make_e1, random_row
from tests.helpers.models import E1_MINI

FAMILIES = [[20, 31, 7], [44, 16]]


def batch(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
    return ids, ids != 0


@pytest.mark.parametrize("first", ["MKTAYIAKQRQISFVKSHFSRQ", "MKTAYIXXXXXISFVKSHFSRQ"])
def test_moments_are_those_of_what_a_cache_stores(first: str) -> None:
    """Of all sequences of a family but the last, at their global positions, in the global layers; X is left out."""
    e1 = TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="exact")
    family = [first, "MKSAYLAKQRHISFIKAHFSRQLEE" * 2, "MRTAFIAKQ"]
    ids = [*chain(*(e1.codes.whole(e1.codes.encode(one, "it")) for one in family))]
    rows, places = e1.codes.present([ids])
    positions = None if places is None else torch.tensor(places)
    calibrator = KVCalibrator(e1.model, max_positions=1).partial_fit(torch.tensor(rows), None, positions)
    statistics = calibrator.finalize(presets=()).statistics
    cache = e1.prefill(",".join(family[:2]))
    assert calibrator.n_residues_seen_ == cache.lengths == statistics.residues.keys.count
    for name, moments in (("keys", statistics.residues.keys), ("values", statistics.residues.values)):
        stored = np.stack([layer.packed[name][0].numpy() for layer in cache.layers])
        np.testing.assert_allclose(moments.mean, stored.mean(2), rtol=0, atol=1e-4)
    # None of the query's tokens is in the sample.
    assert statistics.sample.positions.max() == len(ids) - len(family[2]) - e1.codes.around - 1
    assert len(cache.token_ids[0]) == len(statistics.sample.positions)


def test_a_batch_of_families_gives_what_each_gives() -> None:
    """Families in one row see neither each other's sequences nor each other's positions."""
    model, rows = make_e1(layers=6), [random_row(lengths, seed) for seed, lengths in enumerate(FAMILIES)]
    together = KVCalibrator(model).partial_fit(*batch(rows)).take()
    apart = KVCalibrator(model)
    for row in rows:
        apart.partial_fit(row)
    alone = apart.take()
    for ours, theirs in (
        (together.residues.keys, alone.residues.keys),
        (together.residues.values, alone.residues.values),
        (together.sensitivity.keys, alone.sensitivity.keys),
        (together.sensitivity.values, alone.sensitivity.values),
    ):
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=0, atol=1e-4 * np.abs(theirs.mean).max())
        np.testing.assert_allclose(
            ours.covariance, theirs.covariance, rtol=0, atol=1e-3 * np.abs(theirs.covariance).max()
        )
    np.testing.assert_allclose(together.sensitivity.queries, alone.sensitivity.queries, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("pairs", [0, 2**24], ids=["one by one", "padded together"])
def test_sensitivities_follow_their_definition(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    """Errors count where a sequence reads those before it: never its own keys, which are exact."""
    monkeypatch.setattr(padding, "_MAX_PAIRS", {"cpu": pairs})
    monkeypatch.setattr(collectors, "_RESIDUES_PER_QUERY", 1)
    heads, head_dim, lengths, homologs = 2, 16, [30, 50, 20, 25, 18], [0, 1, 2, 0, 1]
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    queries, keys, values = (torch.randn(heads, tokens, head_dim, generator=generator) for _ in range(3))
    root = torch.randn(1, heads, head_dim, head_dim, generator=generator)
    bounds = [0, *np.cumsum(lengths).tolist()]
    special = torch.zeros(tokens, dtype=torch.bool)
    special[bounds[:-1]] = True
    positions = torch.cat([torch.arange(100), 7 + torch.arange(43)])
    inv_freq = torch.zeros(head_dim // 2)
    proteins = Proteins.of(lengths, positions, special, [0] * 5, homologs)
    collector = SensitivityCollector(proteins, root, inv_freq)
    expected = np.zeros((2, heads, tokens))
    outer, outputs = np.zeros((heads, head_dim, head_dim)), torch.zeros_like(queries)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        first = bounds[number - homologs[number]]
        seen = slice(first, end)
        attention = (queries[:, begin:end] @ keys[:, seen].transpose(1, 2)).softmax(-1)
        outputs[:, begin:end] = attention @ values[:, seen]
        for head in range(heads):
            for i in range(begin + 1, end):
                for j in range(first, begin):
                    if special[j]:
                        continue
                    squared = float(attention[head, i - begin, j - first]) ** 2
                    change = (values[head, j] - outputs[head, i]) @ root[0, head]
                    gain = squared * float(change.square().sum())
                    expected[:, head, j] += gain, squared
                    outer[head] += gain * np.outer(queries[head, i], queries[head, i])
    collector.observe(0, LayerStates(queries, keys, values, outputs))
    found = collector.result()
    count = sum(lengths[number] - 1 for number in (0, 1, 3))
    assert found.count == count == int((proteins.stored & ~special).sum()) and KEY_BLOCK < 100
    np.testing.assert_allclose(found.queries[0], outer / count, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.attention[0], expected[1].sum(1) / count, rtol=1e-4)
    for weights, direct in zip(collector.weights[0], expected, strict=True):
        np.testing.assert_allclose(weights, np.sqrt(direct), rtol=1e-3, atol=1e-5)


def test_single_sequences_are_no_calibration() -> None:
    calibrator = KVCalibrator(make_e1()).partial_fit(random_row([60]))
    with pytest.raises(ValueError, match="has seen 0 residues that sequences after them read"):
        calibrator.finalize()
