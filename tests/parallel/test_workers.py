"""Processes that share the pieces of a run: all results once, whatever dies, and those of one process."""

from __future__ import annotations

import copy
import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.esm import modeling_esm

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.files.writing import WritingError
from esm_turbo.parallel import worker
from esm_turbo.parallel.storing import store_sequences
from esm_turbo.parallel.worker import filled_by_others
from esm_turbo.parallel.workers import NoWorkersError, Workers
from esm_turbo.tasks.calibration.records import calibrate_records
from esm_turbo.tasks.common import forwards
from esm_turbo.tasks.common.pieces import InProcessRunner
from esm_turbo.tasks.embedding.records import UnfinishedError, embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from esm_turbo.tasks.scoring import records as scoring
from esm_turbo.tasks.variants.records import score_records as score_variants
from tests.helpers.embedding_files import files, h5_content, proteins
from tests.helpers.numbers_to_square import (
    Crowd,
    Echo,
    HalfAnAnswer,
    Load,
    LoadTogether,
    Raises,
    Squares,
    Threads,
    begin_with_torch,
    die_at_once,
)

UNUSED = "the others go on without it"
DIED = "a worker on {} died (signal SIGKILL); {}"


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "esm_turbo"):
        yield


def run(workers: Workers, task: Any, pieces: Sequence[Any]) -> dict[int, Any]:
    """Run pieces, and check that every result comes once and is counted."""
    calls: list[tuple[str, int, int]] = []
    units = list(range(1, len(pieces) + 1))
    found = list(workers.run(task, pieces, stage="s", units=units, progress=lambda *call: calls.append(call)))
    assert sorted(index for index, _ in found) == list(range(len(pieces)))
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert calls[-1] == ("s", sum(units), sum(units))
    return dict(found)


def squares(*devices: str, count: int = 12) -> dict[int, tuple[int, str]]:
    [device] = devices
    return {number: (number**2, device) for number in range(count)}


def test_all_pieces_once_and_again_and_those_that_look_ahead(tmp_path: Path) -> None:
    with Workers(Load(), ["cpu:0", "cpu:1"]) as workers:
        assert workers.devices == "cpu:0 cpu:1"
        assert {n: square for n, (square, _) in run(workers, Squares(tmp_path), range(12)).items()} == {
            n: n * n for n in range(12)
        }
        # The processes stay for the next run.
        ahead = run(workers, Squares(tmp_path, ahead=True), range(3))
        assert {n: square for n, (square, _) in ahead.items()} == {0: 0, 1: 1, 2: 4}
        assert not list(workers.run(Squares(Path()), [], stage="", units=[]))
        with pytest.raises(ValueError, match="-1 is negative"):
            list(workers.run(Squares(Path()), [-1], stage="", units=[1]))


def test_workers_that_run_pieces_take_no_other_call(tmp_path: Path) -> None:
    with Workers(Load(), ["cpu:0", "cpu:1"]) as workers:
        first = workers.run(Squares(tmp_path), range(12), stage="s", units=[1] * 12)
        found = [next(first)]
        with pytest.raises(RuntimeError, match="a worker runs pieces of another call, which has not ended"):
            list(workers.run(Squares(tmp_path), [20], stage="s", units=[1]))
        found += first
        assert {number: square for number, (square, _) in found} == {n: n * n for n in range(12)}
        assert {n: square for n, (square, _) in run(workers, Squares(tmp_path), [5]).items()} == {0: 25}


def test_models_are_loaded_side_by_side(tmp_path: Path) -> None:
    with Workers(LoadTogether(tmp_path, 3, bytes(10_000_000)), ["cpu"] * 3) as workers:
        assert run(workers, Squares(tmp_path), [4]) == {0: (16, "cpu")}
    assert len(list(tmp_path.iterdir())) == 3


def test_processes_that_die_are_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Workers(Load(), ["cpu"]) as workers:
        assert run(workers, Squares(tmp_path, deadly=(2, 7, 11), times=1), range(12)) == squares("cpu")
    assert caplog.messages == [DIED.format("cpu", "it is replaced")] * 3


def test_a_piece_that_kills_every_process_fails_alone(tmp_path: Path) -> None:
    with Workers(Load(), ["cpu", "cpu"]) as workers:
        found = run(workers, Squares(tmp_path, deadly=(5,)), range(12))
    assert found == squares("cpu") | {5: (-1, "its process died 3 times (signal SIGKILL)")}


def test_a_process_killed_while_it_sends_a_result_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for the rest of it."""
    with Workers(Load(), ["cpu"]) as workers:
        assert run(workers, HalfAnAnswer(tmp_path), range(3)) == squares("cpu", count=3)
    assert caplog.messages == [DIED.format("cpu", "it is replaced")]


def test_pieces_and_results_larger_than_what_a_connection_holds() -> None:
    """Neither process waits for the other to read, and what a thread logs is not mixed into a result."""
    pieces = [str(number) * 1_000_000 for number in range(6)]
    found: dict[int, str] = {}
    with Workers(Load(), ["cpu"]) as workers:
        runs = threading.Thread(target=lambda: found.update(run(workers, Echo(), pieces)), daemon=True)
        runs.start()
        runs.join(60)
    assert found == dict(enumerate(pieces))


def test_a_device_that_cannot_be_used_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = {
        f"cpu:0 cannot be used: the model does not fit into its memory; {UNUSED}",
        DIED.format("cpu:2", "it is replaced"),
        DIED.format("cpu:2", UNUSED),
    }
    until = time.monotonic() + 60
    with Workers(Load(full=("cpu:0",), dying=("cpu:2",)), ["cpu:0", "cpu:1", "cpu:2"]) as workers:
        while not set(caplog.messages) >= expected and time.monotonic() < until:
            assert run(workers, Squares(tmp_path), range(3)) == squares("cpu:1", count=3)
    assert set(caplog.messages) == expected


def test_a_device_that_others_fill_is_left_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record fails there that would fit on an empty device: it is run on another."""
    with Workers(Crowd(("cpu:0",)), ["cpu:0", "cpu:1"]) as workers:
        while not caplog.records:
            assert run(workers, Raises(tmp_path), range(9)) == squares("cpu:1", count=9)
    assert caplog.messages == [f"cpu:0 cannot be used: others fill it; {UNUSED}"]


def test_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled_by_others("cpu") is None
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * 2**30)
    for free, expected in ((80, None), (20, "other processes hold 70.0 GiB of its 100.0 GiB of memory")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 100 * 2**30))
        assert filled_by_others("cuda:1") == expected


def test_processes_that_die_before_they_read_what_loads_the_model_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large that is: nobody waits for it to be read."""
    monkeypatch.setattr(worker, "begin", die_at_once)
    with (
        Workers(Load(full=("x" * 10_000_000,)), ["cpu"]) as workers,
        pytest.raises(NoWorkersError, match="no device is left of cpu; the lines above say why"),
    ):
        list(workers.run(Squares(Path()), [1], stage="", units=[1]))
    with pytest.raises(ValueError, match="`devices` must name at least one device"):
        Workers(Load(), [])


@pytest.mark.parametrize("begin", [worker.begin, begin_with_torch])
def test_threads_are_those_asked_for_though_torch_was_imported_before(
    begin: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a process whose starting program imports it at its head."""
    monkeypatch.setattr(worker, "begin", begin)
    with Workers(Threads(), ["cpu"], threads=2) as workers, pytest.raises(NoWorkersError):
        list(workers.run(Squares(Path()), [1], stage="", units=[1]))
    assert caplog.messages == [f"cpu cannot be used: 2 threads; {UNUSED}"]


class Unportable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class UnportableValue(Unportable, ValueError):
    pass


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (partial(Unportable, 1, 2), RuntimeError, "Unportable: 1 and 2"),
        (partial(UnportableValue, 1, 2), ValueError, "1 and 2"),
        (partial(WritingError, "a.pt", "full", 28), OSError, "a.pt: cannot be written (full)"),
        (partial(KeyError, "a"), KeyError, "'a'"),
    ],
)
def test_errors_keep_their_kind_message_and_traceback(
    make: Callable[[], Exception], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    """A command reports those of a full disk, for example, in a line of their own; results before them are kept."""
    found: dict[int, tuple[int, str]] = {}
    with Workers(Load(), ["cpu"]) as workers, pytest.raises(kind) as raised:
        for number, result in workers.run(Raises(tmp_path, (37,), error=make), range(40), stage="", units=[1] * 40):
            found[number] = result
    assert type(raised.value) is kind and str(raised.value) == message
    [note] = raised.value.__notes__
    assert note.startswith("in the worker:\nTraceback") and "raise self.error()" in note
    assert found == squares("cpu", count=37)


_DRIVER = """
import os, sys, time
from esm_turbo.parallel.workers import Workers
from pathlib import Path
from tests.helpers.numbers_to_square import Load, Pids

if __name__ == "__main__":
    with Workers(Load(), ["cpu", "cpu"]) as workers:
        print(*{pid for _, pid in workers.run(Pids(), [0.2] * 9, stage="", units=[1] * 9)}, flush=True)
        if sys.argv[1] == "busy":
            print(next(workers.run(Pids(), [0, 60, 60], stage="", units=[1, 0, 0])), flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_processes_end_with_a_driver_that_is_killed(state: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, script, state], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    if state == "busy":
        assert driver.stdout.readline()
    driver.send_signal(signal.SIGKILL)
    driver.wait(30)
    end = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


PROTEINS = proteins([12, 17, 18, 19, 26, 33, 34, 40, 48])
SEQUENCES = [record.sequence for record in PROTEINS]


@pytest.fixture(scope="module")
def tiny(turbo: TurboEsm, tiny_model: Callable[..., Any]) -> TurboEsm:
    return TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)


@pytest.fixture(scope="module")
def workers(tiny: TurboEsm) -> Iterator[Workers]:
    with Workers.of(tiny, ["cpu", "cpu"]) as both:
        yield both


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for a target to be cut into several pieces."""
    monkeypatch.setattr("esm_turbo.tasks.common.pieces.TOKENS_PER_PIECE", 3200)


def test_every_task_gives_the_bits_of_one_process(
    tiny: TurboEsm, workers: Workers, tmp_path: Path, small_pieces: None
) -> None:
    candidates = [scoring.Candidate(f"c{n}", "ACDEFGHIK"[: n % 7 + 2]) for n in range(12)]
    runs = {}
    for name, runner in (("one", None), ("two", workers)):
        folder = tmp_path / name
        request = EmbeddingRequest.of(tiny, [-1], ["mean", "per_tok"])
        embed_records(tiny, PROTEINS, folder / "pt", request, toks_per_batch=75, runner=runner)
        embed_records(tiny, PROTEINS, folder / "x.h5", request, toks_per_batch=75, runner=runner)
        contexts = ContextStore(folder / "store", host_bytes=0)
        computed = store_sequences(
            tiny, contexts, SEQUENCES, toks_per_batch=75, on_failure=lambda *_: None, runner=runner
        )
        assert computed == len(set(SEQUENCES))
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


@pytest.mark.parametrize(
    "part",
    [lambda model: model.esm.encoder.layer[0].intermediate.dense.weight[0], lambda model: model.lm_head.dense.bias],
    ids=["encoder", "head"],
)
def test_nothing_comes_from_processes_with_another_model(
    tiny: TurboEsm, workers: Workers, tmp_path: Path, part: Callable[..., torch.Tensor]
) -> None:
    """As where the folder of a checkpoint is replaced before they load it."""
    other = TurboEsm(copy.deepcopy(tiny.model), tiny.tokenizer)
    with torch.no_grad():
        part(other.model)[0] += 1e-3
    request, contexts = EmbeddingRequest.of(other, [-1], ["mean"]), ContextStore(tmp_path / "store")
    for run in (
        lambda: embed_records(other, PROTEINS, tmp_path / "pt", request, runner=workers),
        lambda: store_sequences(other, contexts, SEQUENCES, on_failure=lambda *_: None, runner=workers),
        lambda: score_variants(other, PROTEINS[:1], None, ["frozen"], runner=workers),
        lambda: calibrate_records(other, PROTEINS, runner=workers),
        lambda: other.score_pairs(SEQUENCES, ["ACDK"], devices=workers),
        lambda: other.embed(SEQUENCES, include=["mean"], devices=workers),
    ):
        with pytest.raises((ValueError, UnfinishedError), match="is not that of the run: the weights differ"):
            run()
    assert not contexts.info()["contexts"] and not list((tmp_path / "pt").rglob("*.pt"))


@pytest.mark.parametrize("named", [False, True])
def test_processes_do_not_take_over_changed_code(
    turbo: TurboEsm, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    # Under the name of the function that it replaces.
    replaced = functools.wraps(modeling_esm.gelu)(lambda x: x.relu())
    monkeypatch.setattr(modeling_esm, "gelu", replaced if named else torch.nn.functional.relu)
    changed = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    if named:
        changed.model.esm.model_id = "with relu"
    with pytest.raises(ValueError, match="is not that of the run: other code runs in its forward"):
        changed.score_pairs(SEQUENCES[:1], ["ACDK"], arm="full", devices=["cpu"])


def test_another_calibration_is_refused(turbo: TurboEsm, tmp_path: Path) -> None:
    other = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    other.model.set_turbo(calibration=calibrate_records(other, PROTEINS * 40, presets=["turbo3"]), preset="turbo3")
    with Workers.of(other, ["cpu"]) as workers, pytest.raises(ValueError, match="its calibration is another one"):
        turbo.score_pairs(SEQUENCES[:1], ["ACDK"], devices=workers)


def test_another_preset_is_refused(turbo: TurboEsm) -> None:
    other = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    other.model.set_turbo(calibration=turbo.calibration, preset="turbo1")
    preset = turbo.model.base_model.turbo_config.name
    with Workers.of(turbo, ["cpu"]) as workers, pytest.raises(ValueError, match=f"as '{preset}', not as 'turbo1'"):
        other.score_pairs(SEQUENCES[:1], ["ACDK"], devices=workers)


def test_a_worker_killed_anywhere_loses_nothing(tiny: TurboEsm, workers: Workers, tmp_path: Path) -> None:
    request = EmbeddingRequest.of(tiny, [-1], ["mean"])
    embed_records(tiny, PROTEINS, tmp_path / "one", request, toks_per_batch=75)
    killed = []

    def kill(stage: str, done: int, total: int) -> None:
        if done and not killed:
            killed.append(os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL))

    done = embed_records(tiny, PROTEINS, tmp_path / "two", request, toks_per_batch=75, runner=workers, progress=kill)
    assert killed and not done.failed
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_calls_return_what_one_process_does(tiny: TurboEsm, workers: Workers, small_pieces: None) -> None:
    peptides, variants = ["ACDK", "GHI"], [[f"{one[0]}1G", f"{one[1]}2W"] for one in SEQUENCES]
    with Workers.of(tiny, ["cpu"]) as alone:
        given = (None, alone, workers)
        embedded = [tiny.embed(SEQUENCES, (0, -1), ["mean", "per_tok"], toks_per_batch=75, devices=x) for x in given]
        scored = [tiny.score_pairs([*SEQUENCES, "MK1"], peptides, devices=x) for x in given[1:]]
        effects = [tiny.score_many_variants(SEQUENCES, variants, devices=x) for x in given]
        # However proteins are written, parts of them have the same substitutions.
        written = [[*SEQUENCES, "MK1"], [*(f"{one[:2].lower()} {one[2:]}\n" for one in SEQUENCES), "mk1"]]
        every = [tiny.score_many_variants(one, devices=alone) for one in written]
        with pytest.raises(ValueError, match="`place` must be"):
            tiny.score_pairs(SEQUENCES, peptides, place="anywhere", devices=alone)  # type: ignore[arg-type]
    for expected, *others in zip(*embedded, strict=True):
        for found in others:
            assert expected.representations.keys() == found.representations.keys() == {0, 2}
            for layer, states in expected.representations.items():
                assert torch.equal(torch.as_tensor(found.representations[layer]), torch.as_tensor(states))
                means = [torch.as_tensor(one.mean_representations[layer]) for one in (expected, found)]
                assert torch.equal(*means)
    assert list(scored[0].failed) == [len(SEQUENCES)] and "position 3 is '1'" in scored[0].failed[len(SEQUENCES)]
    assert (scored[0].scores, scored[0].failed) == (scored[1].scores, scored[1].failed)
    assert effects[1].scores == effects[2].scores and not effects[1].failed
    assert every[0].scores == every[1].scores and every[0].failed == every[1].failed
    assert list(every[0].failed) == [len(SEQUENCES)]
    # Batches are filled across targets, and a piece has fewer of them.
    plain = tiny.score_pairs(SEQUENCES, peptides)
    for expected, found in zip(plain.scores, scored[1].scores[:-1], strict=True):
        values = [torch.tensor([score.pseudo_log_likelihood for score in of.scores]) for of in (expected, found)]
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-4)
    for expected, found in zip(effects[0].scores, effects[1].scores, strict=True):
        torch.testing.assert_close(torch.tensor(found.values), torch.tensor(expected.values), rtol=0, atol=1e-4)


def test_wrong_arguments_are_refused_before_a_process_starts(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "of", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    devices = ["cpu", "cpu"]
    for match, call, arguments, options in (
        (r"`devices` must be 'all', a list of names .* got 'cuda:0'", turbo.embed, [], {"devices": "cuda:0"}),
        ("devices='all' finds no CUDA device here", turbo.score_pairs, [["ACD"]], {"devices": "all"}),
        ("`devices` computes embeddings, but no caches", turbo.embed, [], {"return_cache": True}),
        ("candidate 2 of target 0", turbo.score_pairs, [["ACD", "<mask>"]], {}),
        ("`variants` must be one list per protein", turbo.score_many_variants, [[]], {}),
        ("`refresh` must be an integer of at least 0, got -1", turbo.score_pairs, [["ACD"]], {"refresh": -1}),
        ("`refresh` must be an integer of at least 0, got None", turbo.score_pairs, [["ACD"]], {"refresh": None}),
        ("`refresh` must be an integer of at least 0, got '8'", turbo.score_many_variants, [], {"refresh": "8"}),
        ("`refresh` must be an integer of at least 0, got 1.5", turbo.score_many_variants, [], {"refresh": 1.5}),
    ):
        with pytest.raises(ValueError, match=match):
            call(SEQUENCES, *arguments, **{"devices": devices} | options)  # type: ignore[operator]
    with pytest.raises(ValueError, match="position 2 is '1'"):
        turbo.embed(["M1"], devices=devices)


class Dying(Workers):
    """Processes that die of every piece."""

    def __init__(self) -> None:
        self.devices = "cpu"

    def results(self, task, pieces, units, progress):  # type: ignore[no-untyped-def]
        return ((number, task.failed(piece, "its process died 3 times")) for number, piece in enumerate(pieces))


def test_sequences_that_fail_are_named(turbo: TurboEsm, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="sequence 1 was not embedded: its process died 3 times"):
        turbo.embed(["MKTAY", "GSW"], devices=Dying())
    assert set(turbo.score_pairs(SEQUENCES, ["ACD"], devices=Dying()).failed) == set(range(len(SEQUENCES)))
    assert set(turbo.score_many_variants(SEQUENCES, devices=Dying()).failed) == set(range(len(SEQUENCES)))
    with pytest.raises(NoWorkersError, match="no device is left of cuda:99"):
        turbo.embed(["MKTAY"], devices=["cuda:99"])
    assert "cuda:99 cannot be used" in caplog.text


def test_batches_follow_from_the_kind_of_device(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting(Workers):
        def __init__(self, devices: str) -> None:
            self.devices, self._slots = devices, []

        def results(self, task, pieces, units, progress):  # type: ignore[no-untyped-def]
            sizes.append(sorted(map(len, pieces)))
            return InProcessRunner(turbo).results(task, pieces, units, progress)

    sizes: list[list[int]] = []
    monkeypatch.setattr(forwards, "DEFAULT_TOKS_PER_BATCH", 45)
    monkeypatch.setattr(Workers, "of", lambda turbo, devices: Noting(" ".join(devices)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given: list[Any] = [Noting("cpu"), Noting("cuda:0 cuda:1"), "all", ["cuda:1"], ["cpu", "cpu"]]
    for devices in given:
        turbo.embed(["M" * length for length in (20, 12, 18, 3, 13)], include=["mean"], devices=devices)
    assert sizes == [[2, 3], [5], [5], [5], [2, 3]]
