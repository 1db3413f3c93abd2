"""Filling a store in pieces: failures, and a folder that is not shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.parallel.storing import store_sequences
from esm_turbo.tasks.common import forwards
from esm_turbo.tasks.common.pieces import InProcessRunner, Plan, Shard

SEQUENCES = ["MKTAYIAKQR", "QISFVKSHFSRQ", "MKTAYIAKQR", "LEERLGLIEVQAPILSRVGDG"]


class Elsewhere(InProcessRunner):
    """Computes into folders of its own, or finds one protein too large."""

    def __init__(self, turbo: TurboEsm, lost: bool) -> None:
        super().__init__(turbo)
        self.lost = lost

    def run(self, work: Any, pieces: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        for index, piece in enumerate(pieces):
            yield index, (len(piece), {}) if self.lost else work.failed(piece, "too large")


@pytest.fixture
def frozen(turbo: TurboEsm) -> Iterator[TurboEsm]:
    turbo.model.set_turbo(calibration=turbo.calibration, preset="exact")
    yield turbo
    turbo.model.set_turbo(calibration=turbo.calibration)


def test_shards_share_the_contexts(frozen: TurboEsm, tmp_path: Path) -> None:
    store, plans = ContextStore(tmp_path / "store"), [Plan(Shard(number, 2)) for number in (1, 2)]
    computed = [
        store_sequences(frozen, store, SEQUENCES, toks_per_batch=16, on_failure=pytest.fail, plan=plan)
        for plan in plans
    ]
    assert sorted(computed) == [1, 2] and store.count_missing(frozen, SEQUENCES) == 0
    assert store_sequences(frozen, store, SEQUENCES, toks_per_batch=16, on_failure=pytest.fail) == 0
    assert store_sequences(frozen, store, SEQUENCES[:1], on_failure=pytest.fail, plan=Plan(Shard(2, 2))) == 0


def test_failures_of_others_are_reported(frozen: TurboEsm, tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    store = ContextStore(tmp_path / "store")
    runner = Elsewhere(frozen, lost=False)
    assert store_sequences(frozen, store, SEQUENCES, on_failure=failed.__setitem__, runner=runner) == 0
    assert failed == dict.fromkeys(SEQUENCES, "too large")


def test_a_folder_that_is_not_shared_is_noticed(frozen: TurboEsm, tmp_path: Path) -> None:
    store = ContextStore(tmp_path / "store")
    with pytest.raises(OSError, match="3 contexts are missing that other machines have computed"):
        store_sequences(frozen, store, SEQUENCES, on_failure=pytest.fail, runner=Elsewhere(frozen, lost=True))


class Noting(InProcessRunner):
    """Notes the pieces, as if they were computed elsewhere."""

    def __init__(self, turbo: TurboEsm, devices: str) -> None:
        super().__init__(turbo)
        self.devices = devices
        self.pieces: list[list[str]] = []

    def run(self, work: Any, pieces: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        self.pieces += pieces
        return super().run(work, pieces, **options)


def test_pieces_follow_from_the_kind_of_device(
    frozen: TurboEsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "DEFAULT_TOKS_PER_BATCH", 16)
    found = {}
    for devices, tokens in (("cpu", None), ("cuda:0 cuda:1", None), ("cuda", 16)):
        runner, store = Noting(frozen, devices), ContextStore(tmp_path / f"{devices} {tokens}")
        assert store_sequences(frozen, store, SEQUENCES, on_failure=pytest.fail, runner=runner, toks_per_batch=tokens)
        found[devices] = [sorted(map(len, piece)) for piece in runner.pieces]
    # On CUDA all fit into one batch, unless the option says otherwise.
    assert found == {"cpu": [[21], [12], [10]], "cuda:0 cuda:1": [[10, 12, 21]], "cuda": [[21], [12], [10]]}


class Killed(InProcessRunner):
    """Its process is killed after the last piece, and leaves a claim."""

    def run(self, work: Any, pieces: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        yield from super().run(work, pieces, **options)
        claim = work.store.folder / ".claim.abcdefgh.tmp"
        claim.mkdir()
        (claim / "keys.json").write_text("[]")


def test_what_killed_processes_leave_is_removed(frozen: TurboEsm, tmp_path: Path) -> None:
    store = ContextStore(tmp_path / "store")
    assert store_sequences(frozen, store, SEQUENCES, on_failure=pytest.fail, runner=Killed(frozen)) == 3
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".claim")]
    # Where there is no folder, there is nothing to remove.
    ContextStore(tmp_path / "none").sweep()
    assert not (tmp_path / "none").exists()
