"""Contexts of many targets: from a store and into it, read in place, and by several threads."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from esm_turbo import ContextStore, TurboEsm, TurboKVCache
from esm_turbo.model.pooled import PooledContexts
from esm_turbo.store.flat import FlatContext
from esm_turbo.tasks.common import forwards, row_engine
from esm_turbo.tasks.common.options import Arm
from tests.helpers.scores import assert_close

TARGETS = ["MKTAYIAKQRQISFVKSHFSRQLEERLG", "GSWKDLAEPL", "MK", "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSR"]
CANDIDATES = ["ACDEF", "WTC", "GGGSG", "A"]


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


def test_targets_may_read_different_parts_of_one_context(turbo: TurboEsm) -> None:
    """A target that ends in a mask, and a longer candidate of the target without it."""
    target = TARGETS[0]
    pairs = [(target + "<mask>", ["A"]), (target, ["AC"])]
    for order in (pairs, pairs[::-1]):
        found = turbo.score_pairs([one for one, _ in order], [own for _, own in order], background="none")
        for scores, (one, own) in zip(found, order, strict=True):
            assert_close(scores, turbo.score(one, own, place="masked"))


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
