"""`GenerationOptions`: the options of generation, documented and checked in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from esm_turbo.tasks.common.checks import check_choice, check_count
from esm_turbo.tasks.common.options import UnmaskingOrder

# Logits divided by less, or by more, leave the range of float32.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6

Allowed = str | Mapping[int, str] | None
"""Residues for all positions, or residues by position, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of generation. Those that do not depend on the sequences are checked here.

    With `max_new_tokens`, that many residues are appended to each sequence, one after the other. Otherwise residues
    replace every `<mask>`, or those at `positions`.

    Attributes:
        max_new_tokens: number of residues to append to each sequence.
        positions: positions to replace, counted from 1: one list for every sequence, or a list for each. Repeated ones
            count once. None is every `<mask>`.
        order: the order in which positions are drawn. `random` is the default. `confidence` starts where the model is
            most certain; later sweeps start with the residues that it found least likely. `left_to_right` is the
            order of the sequence.
        per_step: number of positions of a sequence drawn per step, independently of each other.
        sweeps: how often each position is drawn. From the second sweep on, positions are masked again and drawn given
            all others (Gibbs sampling).
        num_return_sequences: number of samples per sequence.
        temperature: divides the logits; 0 selects the most likely residue.
        top_k: draw among the k most likely residues; None for all.
        top_p: draw among the most likely residues that together have this probability.
        allowed: residues that may be generated: letters for all positions, or by position, counted from 1; all other
            positions have the 20 standard residues.
        banned: residues that are never generated.
        refresh: number of cached tokens that run again at a refresh; None is `DEFAULT_REFRESH`. With
            `max_new_tokens` these are the last residues; otherwise the residues on either side of each chosen
            position, which run with it at every step.
        refresh_every: steps from one refresh to the next. With `max_new_tokens`, a refresh drops the last residues
            from the cache and computes them again (None is 1). Otherwise it computes the whole protein again (None is
            8). So 1 computes every step in full; with `max_new_tokens`, only if `refresh` exceeds the length.
        return_cache: with `max_new_tokens`, also return the cache of the generated sequences.

    Raises:
        ValueError: an option is out of range, or two options exclude each other.
    """

    max_new_tokens: int | None = None
    positions: Sequence[int] | Sequence[Sequence[int]] | None = None
    order: UnmaskingOrder | None = None
    per_step: int = 1
    sweeps: int = 1
    num_return_sequences: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    allowed: Allowed = None
    banned: str = ""
    refresh: int | None = None
    refresh_every: int | None = None
    return_cache: bool = False

    def __post_init__(self) -> None:
        for name in ("per_step", "sweeps", "num_return_sequences"):
            check_count(name, getattr(self, name))
        for name, minimum in (("max_new_tokens", 1), ("top_k", 1), ("refresh", 0), ("refresh_every", 1)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), minimum)
        if self.order is not None:
            check_choice("order", self.order, get_args(UnmaskingOrder))
        if self.max_new_tokens is None:
            if self.return_cache:
                raise ValueError("`return_cache` needs `max_new_tokens`")
        elif self.positions is not None or self.order is not None or (self.per_step, self.sweeps) != (1, 1):
            raise ValueError("`positions`, `order`, `per_step` and `sweeps` cannot be combined with `max_new_tokens`")
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE
        ):
            raise ValueError(
                f"`temperature` must be from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE:.0f}, or 0 for the most likely"
                f" residue, got {self.temperature!r}"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, got {self.top_p!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
