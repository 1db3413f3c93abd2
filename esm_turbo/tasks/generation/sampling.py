"""From logits to residues: which are allowed, and how one of them is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from esm_turbo.proteins.fasta import RESIDUES, STANDARD_RESIDUES
from esm_turbo.proteins.tokens import TokenCodes

# Logits divided by less would leave the range of float32.
# Logits divided by less, or by more, would leave float32.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-6, 1e6

Allowed = str | Mapping[int, str] | None
"""Residues everywhere, or by position, counted from 1."""


@dataclass(frozen=True)
class Sampling:
    """How a residue is drawn from the model's distribution over the allowed ones.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest residue.
        top_k: draw among so many likeliest residues; None for all.
        top_p: draw among the likeliest residues that together have this probability.

    Raises:
        ValueError: a number is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature <= _MOST_TEMPERATURE
        ):
            raise ValueError(
                f"`temperature` must be from {_LEAST_TEMPERATURE} to {_MOST_TEMPERATURE:.0f}, or 0 for the likeliest"
                f" residue, got {self.temperature!r}"
            )
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, got {self.top_p!r}")

    def warpers(self) -> LogitsProcessorList:
        """Hugging Face's, in the order in which it applies them."""
        warpers = LogitsProcessorList()
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        return warpers


class AllowedResidues(LogitsProcessor):
    """Takes every token out of the running that may not stand at a position; special tokens never may.

    Args:
        codes: of the model's tokenizer.
        vocab_size: of the model.
        allowed: residues everywhere, or by position from 1, where others have the 20 standard ones.
        banned: residues that never appear.

    Attributes:
        positions: which position each row of the scores is for, [rows]; to be set before a call.

    Raises:
        ValueError: a letter is no residue, a position is none, or nothing is left to choose from.
    """

    def __init__(self, codes: TokenCodes, vocab_size: int, allowed: Allowed = None, banned: str = "") -> None:
        self.codes = codes
        if not (allowed is None or isinstance(allowed, str | Mapping)):
            raise ValueError(f"`allowed` must be residues, or residues by position, got {allowed!r}")
        by_position = allowed if isinstance(allowed, Mapping) else {}
        everywhere = allowed if isinstance(allowed, str) else STANDARD_RESIDUES
        out = _residues("banned", banned)
        self.everywhere = self._mask(vocab_size, _residues("allowed", everywhere) - out, "anywhere")
        self.by_position: dict[int, Tensor] = {}
        for position, letters in by_position.items():
            name = f"allowed[{position!r}]"
            if type(position) is not int or position < 1:
                raise ValueError(f"`{name}`: positions are integers counted from 1")
            chosen = _residues(name, letters) - out
            self.by_position[position] = self._mask(vocab_size, chosen, f"at position {position}")
        self.positions: Sequence[int] = ()

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        rows = [self.by_position.get(position, self.everywhere) for position in self.positions]
        return scores.masked_fill(~torch.stack(rows), -torch.inf)

    def _mask(self, vocab_size: int, letters: set[str], where: str) -> Tensor:
        if not letters:
            raise ValueError(f"no residue may stand {where}: `allowed` and `banned` leave none")
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[[self.codes.residues[letter] for letter in letters]] = True
        return mask


class ResidueSampler:
    """Draws residues for a batch, each row with a generator of its own, so that rows do not depend on each other.

    Everything happens on the CPU: a seed gives the same residues from the same logits whatever the device.

    Args:
        sampling: how.
        allowed: which.
        seeds: of the rows.
    """

    def __init__(self, sampling: Sampling, allowed: AllowedResidues, seeds: Sequence[int]) -> None:
        self.sampling = sampling
        self.allowed = allowed
        self.warpers = sampling.warpers()
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Logits [n, vocab_size] with what is not allowed at these positions at minus infinity; float32, CPU."""
        self.allowed.positions = positions
        return self.allowed(None, logits.to("cpu", torch.float32))

    def draw(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[float]]:
        """One residue for each of n distributions.

        Args:
            logits: [n, vocab_size].
            rows: the row of the batch that each is for.
            positions: the position that each is for.

        Returns:
            Token ids, and their log-probabilities under the model: before temperature, cuts and constraints.

        Raises:
            ValueError: the logits are not finite.
        """
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model's logits are not finite; try another dtype")
        scores = self.scores(logits, positions)
        if self.sampling.temperature == 0:
            chosen = scores.argmax(dim=1)
        else:
            probabilities = self.warpers(None, scores).softmax(dim=1)
            draws = [
                torch.multinomial(p, 1, generator=self.generators[row])
                for p, row in zip(probabilities, rows, strict=True)
            ]
            chosen = torch.cat(draws)
        log_probs = logits.to("cpu", torch.float32).log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]
        return chosen.tolist(), log_probs.tolist()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """A seed for every row: those given, or ones that follow from a single seed and the row's number alone.

    The first row has the single seed itself, so that any row can be made again, by itself, from its own.

    Raises:
        ValueError: they are not as many as rows, or negative.
    """
    if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0:
        words = (np.random.SeedSequence((seed, row)).generate_state(1, np.uint64)[0] for row in range(rows))
        following = [int(word >> 1) for word in words]
        return [seed, *following[1:]] if rows and seed < 2**63 else following
    if isinstance(seed, Iterable):
        seeds = list(seed)
        if len(seeds) == rows and all(type(one) is int and 0 <= one < 2**63 for one in seeds):
            return seeds
    raise ValueError(f"`seed` must be an integer of at least 0, or one for each of the {rows} rows, got {seed!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Makes sure that a number is an integer of at least so many.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")


def _residues(name: str, letters: str) -> set[str]:
    if not isinstance(letters, str):
        raise ValueError(f"`{name}` must be a string of residue letters, got {letters!r}")
    unknown = sorted(set(letters.upper()) - set(RESIDUES))
    if unknown:
        raise ValueError(f"`{name}` holds {unknown[0]!r}, which is no residue code ({RESIDUES})")
    return set(letters.upper())
