"""Processes that share the pieces of a run: all results once, whatever dies."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.parallel import worker
from esm_turbo.parallel.storing import store_sequences
from esm_turbo.parallel.workers import NoWorkersError, Workers
from esm_turbo.tasks.calibration.records import calibrate_records
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from esm_turbo.tasks.scoring import records as scoring
from esm_turbo.tasks.variants.records import score_records as score_variants
from tests.helpers.embedding_files import files, h5_content, proteins
from tests.helpers.numbers_to_square import Echo, Load, LoadTogether, Squares, die_at_once

EXPECTED = {
    "cpu:0 cannot be used: the model does not fit into its memory; the others go on without it",
    "a worker on cpu:2 died (signal SIGKILL); the others go on without it",
}
Run = Callable[..., dict[int, tuple[int, str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the pieces 0, 1, ... and check that every result comes once."""

    def squares(workers: Workers, count: int = 12, **options: Any) -> dict[int, tuple[int, str]]:
        calls: list[tuple[str, int, int]] = []
        found = list(
            workers.run(
                Squares(tmp_path, **options),
                range(count),
                stage="square",
                units=list(range(count)),
                progress=lambda *call: calls.append(call),
            )
        )
        assert sorted(index for index, _ in found) == list(range(count))
        assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
        assert calls[-1] == ("square", sum(range(count)), sum(range(count)))
        return dict(found)

    return squares


def test_all_pieces_once_and_again_and_those_that_look_ahead(run: Run) -> None:
    with Workers(Load(), ["cpu:0", "cpu:1"]) as workers:
        assert workers.devices == "cpu:0 cpu:1"
        assert {index: square for index, (square, _) in run(workers).items()} == {n: n * n for n in range(12)}
        # The processes stay for the next run.
        assert {index: square for index, (square, _) in run(workers, 3, ahead=True).items()} == {0: 0, 1: 1, 2: 4}
        assert not list(workers.run(Squares(Path()), [], stage="", units=[]))
        with pytest.raises(ValueError, match="-1 is negative"):
            list(workers.run(Squares(Path()), [-1], stage="", units=[1]))


def test_models_are_loaded_side_by_side(tmp_path: Path) -> None:
    load = LoadTogether(tmp_path, 3, bytes(10_000_000))
    with Workers(load, ["cpu"] * 3) as workers:
        assert dict(workers.run(Squares(tmp_path), [4], stage="", units=[1])) == {0: (16, "cpu")}
    assert len(list(tmp_path.iterdir())) == 3


def test_processes_that_die_are_replaced(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "esm_turbo"), Workers(Load(), ["cpu:0", "cpu:1"]) as workers:
        found = run(workers, deadly=(2, 7, 11), times=1)
    assert {index: square for index, (square, _) in found.items()} == {n: n * n for n in range(12)}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3 and all("died (signal SIGKILL); it is replaced" in message for message in messages)


def test_a_piece_that_kills_every_process_fails_alone(run: Run) -> None:
    with Workers(Load(), ["cpu:0", "cpu:1"]) as workers:
        found = run(workers, deadly=(5,))
    assert found.pop(5) == (-1, "its process died 3 times (signal SIGKILL)")
    assert {index: square for index, (square, _) in found.items()} == {n: n * n for n in range(12) if n != 5}


@pytest.mark.parametrize("logs", [False, True])
def test_pieces_and_results_larger_than_what_a_connection_holds(logs: bool) -> None:
    """Neither process waits for the other to read, and what a thread logs is not mixed into a result."""
    pieces = [str(number) * 1_000_000 for number in range(6)]
    found: dict[int, str] = {}
    with Workers(Load(), ["cpu"]) as workers:
        run = threading.Thread(
            target=lambda: found.update(workers.run(Echo(logs), pieces, stage="", units=[1] * 6)), daemon=True
        )
        run.start()
        run.join(60)
    assert found == dict(enumerate(pieces))


def test_a_device_that_cannot_be_used_is_left_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "esm_turbo"),
        Workers(Load(full=("cpu:0",), dying=("cpu:2",)), ["cpu:0", "cpu:1", "cpu:2"]) as workers,
    ):
        messages: set[str] = set()
        until = time.monotonic() + 60
        while not messages >= EXPECTED and time.monotonic() < until:
            assert {device for _, device in run(workers, 3).values()} == {"cpu:1"}
            messages = {record.getMessage() for record in caplog.records}
    assert messages == EXPECTED | {"a worker on cpu:2 died (signal SIGKILL); it is replaced"}


def test_processes_that_die_before_they_read_what_loads_the_model_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large that is: nobody waits for it to be read."""
    monkeypatch.setattr(worker, "begin", die_at_once)
    with (
        Workers(Load(full=("x" * 10_000_000,)), ["cpu"]) as workers,
        pytest.raises(NoWorkersError, match="no device is left"),
    ):
        list(workers.run(Squares(Path()), [1], stage="", units=[1]))


def test_without_any_device_the_run_ends() -> None:
    with (
        Workers(Load(full=("cpu",)), ["cpu", "cpu"]) as workers,
        pytest.raises(NoWorkersError, match="no device is left"),
    ):
        list(workers.run(Squares(Path()), [1], stage="", units=[1]))
    with pytest.raises(ValueError, match="`devices` must name at least one device"):
        Workers(Load(), [])


PROTEINS = proteins([12, 17, 18, 19, 26, 33, 34, 40, 48])


@pytest.fixture(scope="module")
def tiny(turbo: TurboEsm, tiny_model: Callable[..., Any]) -> TurboEsm:
    return TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)


@pytest.fixture(scope="module")
def workers(tiny: TurboEsm) -> Iterator[Workers]:
    with Workers.of(tiny, ["cpu", "cpu"]) as both:
        yield both


def test_every_task_gives_the_bits_of_one_process(
    tiny: TurboEsm, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough for a target to be cut into several pieces.
    monkeypatch.setattr("esm_turbo.tasks.common.pieces.TOKENS_PER_PIECE", 1600)
    candidates = [scoring.Candidate(f"c{n}", "ACDEFGHIK"[: n % 7 + 2]) for n in range(12)]
    runs = {}
    for name, runner in (("one", None), ("two", workers)):
        folder = tmp_path / name
        request = EmbeddingRequest.of(tiny, [-1], ["mean", "per_tok"])
        embed_records(tiny, PROTEINS, folder / "pt", request, toks_per_batch=75, runner=runner)
        embed_records(tiny, PROTEINS, folder / "x.h5", request, toks_per_batch=75, runner=runner)
        contexts = ContextStore(folder / "store", host_bytes=0)
        sequences = [record.sequence for record in PROTEINS]
        computed = store_sequences(
            tiny, contexts, sequences, toks_per_batch=75, on_failure=lambda *_: None, runner=runner
        )
        assert computed == len(set(sequences))
        scored = scoring.score_records(tiny, PROTEINS[:3], candidates, ["frozen", "full"], runner=runner)
        effects = score_variants(tiny, PROTEINS[:3], None, ["frozen"], store=contexts, runner=runner)
        runs[name] = [list(scored.rows()), list(effects.rows())]
        assert not scored.failed and not effects.failed and len(runs[name][0]) == 3 * 12 * 2
    assert runs["one"] == runs["two"]
    # `settings.json` is the same too: the device is, and the index and the contexts are.
    one, two = (
        {name: digest for name, digest in files(tmp_path / run).items() if not name.endswith((".h5", "usage.jsonl"))}
        for run in ("one", "two")
    )
    assert one == two and len(one) > 2 * len(PROTEINS)
    assert h5_content(tmp_path / "one" / "x.h5") == h5_content(tmp_path / "two" / "x.h5")


def test_a_calibration_has_the_bits_of_one_process(tiny: TurboEsm, workers: Workers) -> None:
    found = []
    for runner in (None, workers):
        calibration = calibrate_records(tiny, PROTEINS, toks_per_batch=20, presets=["turbo3"], runner=runner)
        statistics = calibration.statistics
        moments = [statistics.residues.keys, statistics.specials.values, statistics.sensitivity.keys]
        found.append([*(one.covariance for one in moments), statistics.sensitivity.queries, statistics.sample.keys])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_worker_killed_anywhere_loses_nothing(
    tiny: TurboEsm, workers: Workers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = EmbeddingRequest.of(tiny, [-1], ["mean"])
    embed_records(tiny, PROTEINS, tmp_path / "one", request, toks_per_batch=75)
    killed = []

    def kill(stage: str, done: int, total: int) -> None:
        if done and not killed:
            killed.append(os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL))

    run = embed_records(tiny, PROTEINS, tmp_path / "two", request, toks_per_batch=75, runner=workers, progress=kill)
    assert killed and not run.failed
    assert files(tmp_path / "one") == files(tmp_path / "two")
