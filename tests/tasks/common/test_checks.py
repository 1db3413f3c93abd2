"""Checks of arguments."""

from __future__ import annotations

import pytest

from esm_turbo.tasks.common.checks import check_choice, check_count


@pytest.mark.parametrize(("value", "minimum"), [(1, 1), (0, 0), (10**18, 1)])
def test_counts(value: int, minimum: int) -> None:
    check_count("n", value, minimum)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_invalid_counts(value: object) -> None:
    with pytest.raises(ValueError, match=f"^`n` must be an integer of at least 1, got {value!r}$"):
        check_count("n", value)


def test_choices() -> None:
    assert check_choice("arm", "full", ("full", "turbo")) == "full"
    for value in ("Full", "", None):
        with pytest.raises(ValueError, match=rf"^`arm` must be one of \['full', 'turbo'\], got {value!r}$"):
            check_choice("arm", value, ("full", "turbo"))
