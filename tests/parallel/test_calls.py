"""Calls on several devices: the results of one, and errors by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from esm_turbo import TurboEsm
from esm_turbo.parallel.workers import NoWorkersError, Workers
from esm_turbo.tasks.common import forwards, pieces
from esm_turbo.tasks.common.pieces import InProcessRunner

SEQUENCES = ["MKTAYIAKQRQISFVKSHFS", "MSILVTRPSPAG", "GHIKLMNPQRSTVWYACD", "MKV", "ACDEFGHIKLMNP"]
PEPTIDES = ["ACDK", "GHI"]


@pytest.fixture(scope="module")
def workers(turbo: TurboEsm) -> Iterator[Workers]:
    with Workers.of(turbo, ["cpu", "cpu"]) as made:
        yield made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TOKENS_PER_PIECE", 800)


@pytest.mark.slow
def test_embeddings_are_those_of_one_process(turbo: TurboEsm, workers: Workers) -> None:
    include = ("mean", "per_tok")
    one = turbo.embed(SEQUENCES, (0, -1), include, toks_per_batch=45)
    two = turbo.embed(SEQUENCES, (0, -1), include, toks_per_batch=45, devices=workers)
    for expected, found in zip(one, two, strict=True):
        assert expected.representations.keys() == found.representations.keys()
        for layer, states in expected.representations.items():
            assert torch.equal(torch.as_tensor(found.representations[layer]), torch.as_tensor(states))
            assert torch.equal(
                torch.as_tensor(found.mean_representations[layer]),
                torch.as_tensor(expected.mean_representations[layer]),
            )


@pytest.mark.slow
def test_scores_do_not_depend_on_the_number_of_processes(turbo: TurboEsm, workers: Workers) -> None:
    done: list[tuple[str, int, int]] = []
    two = turbo.score_pairs([*SEQUENCES, "MK1"], PEPTIDES, devices=workers, progress=lambda *call: done.append(call))
    assert done[-1] == ("score", 6 * 7, 6 * 7)
    assert list(two.failed) == [5] and "position 3 is '1'" in two.failed[5]
    with Workers.of(turbo, ["cpu"]) as alone:
        one = turbo.score_pairs([*SEQUENCES, "MK1"], PEPTIDES, devices=alone)
        assert (one.scores, one.failed) == (two.scores, two.failed)
        variants = [[f"{one[0]}1G", f"{one[1]}2W"] for one in SEQUENCES]
        pair = [turbo.score_many_variants(SEQUENCES, variants, devices=given) for given in (alone, workers)]
        assert pair[0].scores == pair[1].scores and not pair[0].failed
    # Batches are filled across targets, and a piece has fewer of them.
    plain = turbo.score_pairs(SEQUENCES, PEPTIDES)
    for expected, found in zip(plain.scores, two.scores[:5], strict=True):
        values = [torch.tensor([score.pseudo_log_likelihood for score in of.scores]) for of in (expected, found)]
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-4)
    whole = turbo.score_many_variants(SEQUENCES, variants)
    for expected, found in zip(whole.scores, pair[1].scores, strict=True):
        torch.testing.assert_close(torch.tensor(found.values), torch.tensor(expected.values), rtol=0, atol=1e-4)


def test_wrong_arguments_are_refused_before_a_process_starts(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "of", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    devices = ["cpu", "cpu"]
    with pytest.raises(ValueError, match=r"`devices` must be 'all', a list of names .* got 'cuda:0'"):
        turbo.embed(SEQUENCES, devices="cuda:0")
    with pytest.raises(ValueError, match="devices='all' finds no CUDA device here"):
        turbo.score_pairs(SEQUENCES, PEPTIDES, devices="all")
    with pytest.raises(ValueError, match="`devices` computes embeddings, but no caches"):
        turbo.embed(SEQUENCES, return_cache=True, devices=devices)
    with pytest.raises(ValueError, match="position 2 is '1'"):
        turbo.embed(["M1"], devices=devices)
    with pytest.raises(ValueError, match="candidate 2 of target 0"):
        turbo.score_pairs(SEQUENCES, ["ACD", "<mask>"], devices=devices)
    with pytest.raises(ValueError, match="`variants` must be one list per protein"):
        turbo.score_many_variants(SEQUENCES, [], devices=devices)
    for wrong in (None, "8", 1.5, -1):
        with pytest.raises(ValueError, match="`refresh` must be an integer of at least 0, got"):
            turbo.score_pairs(SEQUENCES, PEPTIDES, refresh=wrong, devices=devices)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`refresh` must be an integer of at least 0, got"):
            turbo.score_many_variants(SEQUENCES, refresh=wrong, devices=devices)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_fails_in_a_process_is_named(turbo: TurboEsm, workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="`place` must be"):
        turbo.score_pairs(SEQUENCES, PEPTIDES, place="anywhere", devices=workers)  # type: ignore[arg-type]
    with (
        caplog.at_level(logging.WARNING, "esm_turbo"),
        pytest.raises(NoWorkersError, match="no device is left of cuda:99"),
    ):
        turbo.embed(SEQUENCES[:1], devices=["cuda:99"])
    assert "cuda:99 cannot be used" in caplog.text


def test_sequences_that_fail_are_named(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Workers):
        """Processes that die of every piece."""

        def __init__(self) -> None:
            self.devices = "cpu"

        def run(self, work, pieces, **_):  # type: ignore[no-untyped-def,override]
            return ((number, work.failed(piece, "its process died 3 times")) for number, piece in enumerate(pieces))

    with pytest.raises(RuntimeError, match="sequence 1 was not embedded: its process died 3 times"):
        turbo.embed(SEQUENCES, devices=Dying())
    assert set(turbo.score_pairs(SEQUENCES, PEPTIDES, devices=Dying()).failed) == set(range(5))
    assert set(turbo.score_many_variants(SEQUENCES, devices=Dying()).failed) == set(range(5))


def test_batches_follow_from_the_kind_of_device(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting(Workers):
        def __init__(self, devices: str) -> None:
            self.devices, self._slots = devices, []

        def run(self, work, pieces, **_):  # type: ignore[no-untyped-def,override]
            sizes.append(sorted(map(len, pieces)))
            return InProcessRunner(turbo).run(work, pieces, stage="embed", units=[1] * len(pieces))

    sizes: list[list[int]] = []
    monkeypatch.setattr(forwards, "DEFAULT_TOKS_PER_BATCH", 45)
    for devices in ("cpu", "cuda:0 cuda:1"):
        turbo.embed(SEQUENCES, include=["mean"], devices=Noting(devices))
    monkeypatch.setattr(Workers, "of", lambda turbo, devices: Noting(" ".join(devices)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given: list[str | list[str]] = ["all", ["cuda:1"], ["cpu", "cpu"]]
    for names in given:
        turbo.embed(SEQUENCES, include=["mean"], devices=names)
    assert sizes == [[2, 3], [5], [5], [5], [2, 3]]
