"""Many targets at once: the scores of one target at a time, in any batches, with failures set apart."""

from __future__ import annotations

import csv
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from esm_turbo import ContextStore, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import evaluation_proteins
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.store.flat import FlatContext
from esm_turbo.tasks.common import forwards, row_engine
from esm_turbo.tasks.common.memory import NotEnoughMemoryError
from esm_turbo.tasks.common.options import Arm, CandidateFill
from esm_turbo.tasks.scoring.pairs import PairScores
from tests.helpers.scores import assert_close

MakeModel = Callable[..., TurboEsmForMaskedLM]
TARGETS = ["MKTAYIAKQRQISFVKSHFSRQLEERLG", "GSWKDLAEPL", "MK", "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSR"]
CANDIDATES = ["ACDEF", "WTC", "GGGSG", "A"]


def dev_set(count: int) -> tuple[list[str], list[str]]:
    """The first different targets and peptides of peptide_targets_dev.csv."""
    with (evaluation_proteins().parent / "peptide_targets_dev.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    targets = dict.fromkeys(row["Receptor Sequence"] for row in rows)
    return list(targets)[:count], list(dict.fromkeys(row["Sequence"] for row in rows))[:count]


def assert_as_one_by_one(turbo: TurboEsm, found: PairScores, targets: Sequence[str], candidates: list[str]) -> None:
    expected = [turbo.score(t, candidates, arm=found[0].arm, place=found[0].place) for t in targets]
    for one, other in zip(found.scores, expected, strict=True):
        assert one is not None
        assert_close(one, other)


@pytest.mark.parametrize(
    ("arm", "place", "tokens"),
    [("turbo", "masked", None), ("turbo", "empty", 30), ("frozen", "masked", 30), ("frozen", "empty", None)],
)
def test_scores_are_those_of_one_target_at_a_time(
    turbo: TurboEsm, arm: Arm, place: CandidateFill, tokens: int | None
) -> None:
    found = turbo.score_pairs(TARGETS, CANDIDATES, arm=arm, place=place, toks_per_batch=tokens)
    assert found.failed == {}
    assert_as_one_by_one(turbo, found, TARGETS, CANDIDATES)


def test_all_pairs_of_real_targets_and_peptides(turbo: TurboEsm) -> None:
    targets, peptides = dev_set(3)
    found = turbo.score_pairs(targets, peptides, toks_per_batch=2048)
    assert_as_one_by_one(turbo, found, targets, peptides)


def test_the_full_arm_is_the_same_to_the_bit(turbo: TurboEsm) -> None:
    found = turbo.score_pairs(TARGETS[:2], CANDIDATES[:2], arm="full", background="none")
    assert list(found.scores) == [turbo.score(target, CANDIDATES[:2], arm="full") for target in TARGETS[:2]]


def test_each_target_may_have_candidates_of_its_own(turbo: TurboEsm) -> None:
    own = [["ACDEF"], ["WTC", "ACDEF"], ["A"], ["GGGSG", "AC"]]
    found = turbo.score_pairs(TARGETS, own, refresh=3)
    assert [[one.candidate for one in found[i].scores] for i in range(4)] == own
    for i, target in enumerate(TARGETS):
        assert_close(found[i], turbo.score(target, own[i], refresh=3))
    assert [row[:3] for row in found.rows()] == [
        (i, candidate, rank) for i, target in enumerate(own) for candidate, rank, *_ in found[i].rows()
    ]
    assert repr(found) == "PairScores(4 targets, 6 pairs, 0 failed)"


def test_rows_of_several_targets_share_batches(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    indices: list[list[int]] = []
    original = row_engine.log_probabilities

    def watched(*arguments: object, **options: object) -> object:
        indices.append(list(options.get("context_index", ())))  # type: ignore[call-overload]
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(row_engine, "log_probabilities", watched)
    turbo.score_pairs(TARGETS, CANDIDATES[:3], toks_per_batch=4096)
    [index] = indices
    assert len(index) == 4 * (5 + 3 + 5)
    # Contexts of four targets for two lengths.
    assert len(set(index)) == 8


def test_targets_that_fail_do_not_stop_the_others(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    check = forwards.check_memory

    def small(model: object, tokens: int, *, rows: int = 1, more: int = 0) -> None:
        if tokens > 40:
            raise NotEnoughMemoryError(f"{tokens} tokens are too many")
        check(model, tokens, rows=rows, more=more)  # type: ignore[arg-type]

    monkeypatch.setattr(forwards, "check_memory", small)
    found = turbo.score_pairs(["M1K", *TARGETS, "", "MK-"], ["ACDEF", "WTC"])
    assert {i: reason.partition(" ")[0] for i, reason in found.failed.items()} == {
        0: "the", 4: "44", 5: "the", 6: "the"
    }  # fmt: skip
    assert [one is None for one in found.scores] == [True, False, False, False, True, True, True]
    monkeypatch.undo()
    for i in (1, 2, 3):
        assert_close(found[i], turbo.score(TARGETS[i - 1], ["ACDEF", "WTC"]))
    with pytest.raises(ValueError, match="target 4 was not scored: 44 tokens are too many"):
        found[4]


@pytest.mark.parametrize(
    ("targets", "candidates", "options", "message"),
    [
        ([], ["A"], {}, "`targets` must hold at least one target"),
        (["MK"], [], {}, "`candidates` must hold at least one candidate"),
        (["MK"], [["A"], ["C"]], {}, "one list of them per target \\(1\\), got 2 lists"),
        (["MK", "MK"], [["A"], []], {}, "at least one candidate of each target, target 1 has none"),
        (["MK"], ["A", "A1"], {}, "candidate 2 of target 0: position 2 is '1'"),
        (["MK", "MKT"], [["A"], ["<mask>"]], {}, "candidate 1 of target 1: holds a <mask>"),
        (["MK"], ["A"], {"refresh": -1}, "`refresh` must be an integer of at least 0"),
        (["MK"], ["A"], {"place": "full"}, "`place` must be one of"),
        (["MK"], ["A"], {"arm": "fast"}, "`arm` must be one of"),
        (["MK"], ["A"], {"toks_per_batch": 0}, "`toks_per_batch` must be at least 1"),
        (["MK"], ["A"], {"store": "folder"}, r"`store` must be a ContextStore, got a str; .*ContextStore\('folder'\)"),
    ],
)
def test_wrong_arguments(
    turbo: TurboEsm, targets: list[str], candidates: list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        turbo.score_pairs(targets, candidates, **options)  # type: ignore[arg-type]


def test_what_is_no_sequence(turbo: TurboEsm) -> None:
    with pytest.raises(TypeError, match="target 2: a target must be a string, got NoneType"):
        turbo.score_pairs(["MK", None], ["A"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="candidate 1: a candidate must be a string, got int"):
        turbo.score_pairs(["MK"], [[7]])  # type: ignore[list-item]


def test_many_targets_may_share_one_candidate_and_repeat(turbo: TurboEsm) -> None:
    targets = [TARGETS[0][:length] for length in range(1, 25)] * 3
    found = turbo.score_pairs((target for target in targets), "ACD", place="empty")
    assert found.failed == {} and len(found) == len(targets)
    expected = [turbo.score(target, ["ACD"], place="empty") for target in targets[:24]]
    for one, other in zip(found.scores, 3 * expected, strict=True):
        assert one is not None
        assert_close(one, other)


def test_contexts_come_from_a_store_and_go_into_it(turbo: TurboEsm, tmp_path: Path) -> None:
    with ContextStore(tmp_path / "store") as store:
        first = turbo.score_pairs(TARGETS, CANDIDATES[:2], store=store)
        # A length of candidates of each target is a context; their keys are those of `score`.
        assert store.info()["contexts"] == 8
        assert store.info()["usage"]["looked_up"] == store.info()["usage"]["missed"] == 8
        one = turbo.score(TARGETS[0], CANDIDATES[:2], store=store)
        assert store.info()["contexts"] == 8
        again = turbo.score_pairs(TARGETS, CANDIDATES[:2], store=store)
        assert store.info()["usage"]["missed"] == 8
    assert_close(first[0], one)
    assert again == first


def test_contexts_that_autocast_rounds_are_found_ahead(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another thread reads them, which has an autocast of its own."""
    with ContextStore(tmp_path / "store") as store, torch.autocast("cpu", torch.bfloat16):
        first = turbo.score_pairs(TARGETS, CANDIDATES[:2], store=store)
        monkeypatch.setattr(row_engine, "prefill_rows", lambda *_: pytest.fail("computed again"))
        assert turbo.score_pairs(TARGETS, CANDIDATES[:2], store=store) == first


def watched_caches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each batch, whether contexts are read in place, and how many the store holds meanwhile."""
    found: list[tuple[bool, int]] = []
    original = row_engine.log_probabilities

    def watched(*arguments: object, past_key_values: TurboKVCache, **options: object) -> object:
        hold = past_key_values.hold if isinstance(past_key_values, PooledContexts) else None
        assert hold is None or not hold.released
        found.append((hold is not None, past_key_values.batch_size))
        return original(*arguments, past_key_values=past_key_values, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(row_engine, "log_probabilities", watched)
    return found


@pytest.mark.parametrize("arm", ["turbo", "frozen"])
def test_contexts_of_a_store_are_read_in_place(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: Arm
) -> None:
    expected = turbo.score_pairs(TARGETS, CANDIDATES[:2], arm=arm)
    with ContextStore(tmp_path / "store") as store:
        turbo.score_pairs(TARGETS[:3], CANDIDATES[:2], arm=arm, store=store)
    caches = watched_caches(monkeypatch)
    with ContextStore(tmp_path / "store") as store:
        for again in (False, True):
            caches.clear()
            found = turbo.score_pairs(TARGETS, CANDIDATES[:2], arm=arm, store=store, toks_per_batch=4096)
            # Those that were there before in place, those of the last target as they were computed.
            assert caches == ([(True, 8)] if again else [(True, 6), (False, 2)])
            assert store.info()["memory"]["device"]["held"] == 0
            for one, other in zip(found.scores, expected.scores, strict=True):
                assert one is not None and other is not None
                assert_close(one, other)


def test_contexts_that_many_rows_read_are_copied(
    turbo: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(forwards._DECODED_FROM, "cpu", 80)
    caches = watched_caches(monkeypatch)
    with ContextStore(tmp_path / "store") as store:
        first = turbo.score_pairs(TARGETS[:2], ["ACDEF", "WTC"], store=store, toks_per_batch=4096)
        caches.clear()
        again = turbo.score_pairs(TARGETS[:2], ["ACDEF", "WTC"], store=store, toks_per_batch=4096)
    # 5 rows of 14 tokens, and 3 of 12: to none do 80 tokens of one context come.
    assert sorted(caches) == [(True, 4)]
    assert_close(again[1], first[1])
    monkeypatch.setitem(forwards._DECODED_FROM, "cpu", 50)
    caches.clear()
    with ContextStore(tmp_path / "store") as store:
        again = turbo.score_pairs(TARGETS[:2], ["ACDEF", "WTC"], store=store, toks_per_batch=4096)
    assert sorted(caches) == [(False, 2), (True, 2)]
    assert_close(again[1], first[1])


def test_threads_share_a_store_that_has_room_for_few(turbo: TurboEsm, tmp_path: Path) -> None:
    """A context that is read is never evicted: every thread finds the scores of one target at a time."""
    expected = [turbo.score(target, ["ACDEF", "WTC"], place="empty") for target in TARGETS]
    size = FlatContext.of(turbo.prefill(TARGETS[3])).nbytes
    store = ContextStore(tmp_path / "store", device_bytes=4 * size, host_bytes=0)
    turbo.score_pairs(TARGETS, ["ACDEF", "WTC"], place="empty", store=store)
    wrong: list[str] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(4):
            chosen = choose.sample(range(4), 3)
            found = turbo.score_pairs(
                [TARGETS[index] for index in chosen], ["ACDEF", "WTC"], place="empty", store=store, toks_per_batch=16
            )
            for index, one in zip(chosen, found.scores, strict=True):
                try:
                    assert one is not None
                    assert_close(one, expected[index])
                except AssertionError as error:
                    wrong.append(f"thread {seed}, target {index}: {error}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.info()["memory"]["device"]["held"] == 0
    # Threads may have held all that was there; one after the other, each target takes the place of another.
    for target, scores in zip(TARGETS, expected, strict=True):
        [one] = turbo.score_pairs([target], ["ACDEF", "WTC"], place="empty", store=store, toks_per_batch=16).scores
        assert one is not None
        assert_close(one, scores)
    assert store.info()["memory"]["device"]["evicted"] > 0


def test_a_store_of_another_model_is_refused(turbo: TurboEsm, tmp_path: Path, tiny_model: MakeModel) -> None:
    store = ContextStore(tmp_path / "store")
    store.add(TurboEsm(tiny_model(preset=DEFAULT_PRESET), turbo.tokenizer), ["MKTAY"])
    with pytest.raises(ValueError, match="holds contexts of a model without a name, for 2 layers"):
        turbo.score_pairs(TARGETS, CANDIDATES, store=store)
    with pytest.raises(ValueError, match="holds contexts of a model without a name, for 2 layers"):
        turbo.score_many_variants(TARGETS, store=store)
