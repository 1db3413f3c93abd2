"""Checks of arguments that several tasks take."""

from __future__ import annotations

from typing import TypeVar

_Choice = TypeVar("_Choice", bound=str)


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Check that an argument is an integer of at least `minimum`.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or value < minimum:
        raise ValueError(f"`{name}` must be an integer of at least {minimum}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[_Choice, ...]) -> _Choice:
    """Return an argument that must be one of a few strings.

    Raises:
        ValueError: it is not one of `choices`.
    """
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}")
