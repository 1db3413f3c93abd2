"""Stored errors, planted outliers, folds and motifs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.accuracy import components, groups
from benchmarks.harness.embedded import embedded, evaluation_set
from esm_turbo.codecs import codec_without_calibration
from esm_turbo.config import PRESETS, Geometry
from tests.helpers.benchmark_cases import measured


def test_outliers_change_what_is_stored_and_nothing_else() -> None:
    turbo = embedded()
    planted = components.with_outliers(turbo.model, 60)
    ids = torch.tensor([[turbo.codes.cls, *turbo.codes.encode("MKTAYIAKQRQISFVKSHFSRQ", "it"), turbo.codes.eos]])
    with torch.no_grad():
        expected, found = (model(ids, torch.ones_like(ids)).logits for model in (turbo.model, planted))
        layers = [
            model(ids, torch.ones_like(ids), use_cache=True).past_key_values
            for model in map(exact, (turbo.model, planted))
        ]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for kind in ("keys", "values"):
        plain, loud = (cache.layers[3].packed[kind][0].abs().mean(1) for cache in layers)
        # Two of 64 channels of each head.
        assert ((loud / plain - 60).abs() < 0.1).sum(-1).tolist() == [2] * len(plain)
        assert ((loud / plain - 1).abs() < 0.01).sum(-1).tolist() == [62] * len(plain)


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that stores contexts as they are."""
    copied = components.with_outliers(model, 1)
    copied.set_turbo(preset="exact")
    return copied


def test_stored_errors_are_those_of_keys_values_and_scores() -> None:
    codec = codec_without_calibration(PRESETS["int4"], Geometry(1, 2, 16))
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 2, 30, 16, generator=generator) for _ in range(3))
    errors = components.StoredErrors.of(codec)
    errors.add([(query, keys, values)])
    read = codec.decode(0, codec.encode(0, keys, values))
    inner = slice(1, -1)
    for kind, before, after in zip(("key", "value"), (keys, values), read, strict=True):
        noise = (after - before)[0, :, inner].square().sum((1, 2))
        expected = 10 * torch.log10(before[0, :, inner].square().sum((1, 2)) / noise)
        assert errors.snr(kind)[0] == pytest.approx(expected.numpy(), abs=1e-3)
    best = [(query[0, :, inner] @ x[0, :, inner].mT).argmax(-1) for x in (keys, read[0])]
    figures = errors.figures()
    assert figures["recall"]["1"] == pytest.approx(float((best[0] == best[1]).double().mean()))
    assert figures["recall"]["1"] > 0.6
    assert abs(figures["kurtosis"]["channels"]) < 0.5


def test_energy_is_a_share_of_all_pairs() -> None:
    [case] = [case for case in components.preset_cases(1) if case.name == components.ENERGY]
    shares = np.array(measured(case)["retained_energy"])
    assert shares.shape == (12, 32)
    assert (np.diff(shares) >= 0).all() and shares[:, -1] == pytest.approx(1)


def test_groups_hold_their_domains_and_the_residues_of_their_motifs() -> None:
    [case] = groups.cases(4)
    paper, *_ = measured_rows = case.measure(1)
    assert [row["preset"] for row in measured_rows] == list(groups.PRESET_NAMES)
    proteins = evaluation_set("cath_val200", 4)
    classes = [protein.description[0] for protein in proteins]
    for name, number in (("mainly alpha", "1"), ("mainly beta", "2"), ("alpha beta", "3")):
        assert paper["folds"].get(name, {"domains": 0})["domains"] == classes.count(number)
    assert paper["folds"]["all"]["residues"]["tokens"] == sum(len(protein.sequence) for protein in proteins)
    places = groups.in_matches("C..C", "ACAACAACG")
    assert sorted(places) == list(range(1, 8))
