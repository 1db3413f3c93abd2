"""Pieces on a real, local Ray of two actors: all results once, also when an actor is killed."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esm_turbo.files.extras import install_hint
from esm_turbo.parallel.ray_actors import RayActors
from tests.helpers.numbers_to_square import Load, Squares


@pytest.fixture(scope="module")
def actors() -> Iterator[RayActors]:
    with RayActors(Load(), 2) as both:
        yield both


def run(actors: RayActors, work: Squares, count: int = 8) -> dict[int, tuple[int, str]]:
    found: list[tuple[int, Any]] = list(
        actors.run(work, range(count), stage="square", units=list(range(count)), progress=None)
    )
    assert sorted(index for index, _ in found) == list(range(count))
    return dict(found)


@pytest.mark.slow
def test_all_pieces_once_though_actors_are_killed(actors: RayActors, tmp_path: Path) -> None:
    assert actors.devices == "cpu" and not actors.shares_files
    found = run(actors, Squares(tmp_path, deadly=(3, 6), times=1))
    assert found == {number: (number**2, "cpu") for number in range(8)}
    # Both did kill their actor.
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"3", "6"}


@pytest.mark.slow
def test_errors_and_nothing_to_do(actors: RayActors, tmp_path: Path) -> None:
    assert run(actors, Squares(tmp_path), 0) == {}
    with pytest.raises(ValueError, match="-1 is negative"):
        list(actors.run(Squares(tmp_path), [-1], stage="", units=[1]))


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=re.escape(f"--engine ray needs ray: {install_hint('ray')}")):
        RayActors(Load(), 2)


@pytest.mark.slow
def test_settings_of_this_process_are_restored(caplog: pytest.LogCaptureFixture) -> None:
    import ray

    ray.shutdown()

    def settings() -> tuple[Any, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        return dict(os.environ), handlers, faulthandler.is_enabled(), logging.getLogger("ray").level, sys.excepthook

    before = settings()
    with RayActors(Load(), 1) as actors:
        assert actors.devices == "cpu" and ray.is_initialized()
        assert settings()[1:3] == before[1:3]
    assert settings() == before and not ray.is_initialized()
