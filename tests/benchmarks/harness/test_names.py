"""Arms that rows name."""

from __future__ import annotations

from benchmarks.harness import names


def test_arms_include_the_defaults() -> None:
    assert {"frozen, masked, 8", "frozen, empty, 8", "turbo3, masked, 8", "turbo1, masked, 8"} <= set(
        names.screening_arms()
    )
    assert {"full, masked", "full, wild_type", "turbo3, masked, 8"} <= set(names.variant_arms())
