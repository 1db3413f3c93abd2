"""Caches of other packages."""

from __future__ import annotations

from benchmarks.cuda import peers
from benchmarks.harness import names
from tests.helpers.benchmark_cases import measured


def test_missing_peers_are_reported(no_device: None) -> None:
    [case] = peers.peer_cases(((1, 64, 1),))
    figures = measured(case)
    assert {"turbo4, captured", "turbo3, eager"} <= figures["seconds"].keys()
    missing = [name for name in names.PACKAGES if case.shape["versions"][names.PACKAGES[name]] is None]
    assert set(missing) <= figures["failed"].keys()
