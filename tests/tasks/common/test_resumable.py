"""Runs whose results are kept: killed at every write, and continued."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from esm_turbo.assets import EMBEDDED_MODEL
from tests.helpers.killed_runs import killed_runs

RECORDS = [("one", "MKTAYIAKQ"), ("two", "GSW"), ("three", "ACDEFGHIK")]
# A result per record, and the table.
WRITES = len(RECORDS) + 1


@pytest.mark.parametrize("command", ["score", "variants"])
def test_a_screen_killed_at_any_write_is_resumed(command: str, tmp_path: Path) -> None:
    moments = [(number, when) for number in range(1, WRITES + 1) for when in ("half", "after")]
    killed = [
        {"job": command, "records": RECORDS, "out": str(tmp_path / f"{n}-{when}.csv"), "kill_at": n, "when": when}
        for n, when in moments
    ]
    whole = killed[0] | {"kill_at": 0, "out": str(tmp_path / "whole.csv")}
    codes = killed_runs(EMBEDDED_MODEL, [whole, *killed, *(job | {"kill_at": 0} for job in killed)], tmp_path)
    assert codes == [0, *[-signal.SIGKILL] * len(killed), *[0] * len(killed)]
    for number, when in moments:
        out = tmp_path / f"{number}-{when}.csv"
        # No record is lost, none is there twice, and what was kept is not computed again.
        assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
        kept = number if when == "after" and number < WRITES else number - 1
        assert int(out.with_suffix(".csv.found").read_text()) == kept
        assert not list((tmp_path / f".{out.name}.parts").glob("results*"))
