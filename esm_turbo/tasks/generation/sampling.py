"""Drawing residues from logits: the constraint on residues, the sampler, and a seed for every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from esm_turbo.proteins.fasta import RESIDUES, STANDARD_RESIDUES
from esm_turbo.proteins.tokens import TokenCodes
from esm_turbo.tasks.generation.options import Allowed, GenerationOptions

_SEEDS = 99_999_989
"""The largest prime below 10^8."""
NOT_FINITE = "the model's logits are not finite; try another dtype"


class AllowedResidues:
    """The tokens that are allowed at each position. Special tokens never are.

    Args:
        codes: token ids of the model's tokenizer.
        vocab_size: the model's vocabulary size.
        allowed: as in `GenerationOptions`.
        banned: as in `GenerationOptions`.

    Raises:
        ValueError: a letter is not a residue, or one that the model does not read, a position is invalid, or no residue
            is left to choose.
    """

    def __init__(self, codes: TokenCodes, vocab_size: int, allowed: Allowed = None, banned: str = "") -> None:
        self.codes = codes
        if not (allowed is None or isinstance(allowed, str | Mapping)):
            raise ValueError(f"`allowed` must be residues, or residues by position, got {allowed!r}")
        by_position = allowed if isinstance(allowed, Mapping) else {}
        everywhere = allowed if isinstance(allowed, str) else STANDARD_RESIDUES
        excluded = _residues("banned", banned)
        self.everywhere = self._mask(vocab_size, _residues("allowed", everywhere) - excluded, "at any position")
        self.by_position: dict[int, Tensor] = {}
        for position, letters in by_position.items():
            name = f"allowed[{position!r}]"
            if type(position) is not int or position < 1:
                raise ValueError(f"`{name}`: positions are integers counted from 1")
            chosen = _residues(name, letters) - excluded
            self.by_position[position] = self._mask(vocab_size, chosen, f"at position {position}")

    def at(self, positions: Sequence[int]) -> Tensor:
        """True for the tokens allowed at each of these positions, bool [n, vocab_size]."""
        return torch.stack([self.by_position.get(position, self.everywhere) for position in positions])

    def _mask(self, vocab_size: int, letters: set[str], where: str) -> Tensor:
        if not letters:
            raise ValueError(f"no residue may be generated {where}: `allowed` and `banned` leave none")
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        tokens = [self.codes.residues[letter] for letter in letters]
        if self.codes.unknown in tokens:
            raise ValueError(f"X may not be generated {where}: the model leaves X out of what it reads afterwards")
        mask[tokens] = True
        return mask


class ResidueSampler:
    """Draws residues for a batch. Each row has its own generator, so rows do not depend on each other.

    Generators are the CPU's: a seed and logits give the same residues on every device, up to rounding.

    Args:
        options: `temperature`, `top_k` and `top_p` are used.
        allowed: the constraint on residues; it applies before the other options.
        seeds: one per row.
    """

    def __init__(self, options: GenerationOptions, allowed: AllowedResidues, seeds: Sequence[int]) -> None:
        self.greedy = options.temperature == 0
        self.allowed = allowed
        self.warpers = _warpers(options)
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Logits [n, vocab_size] with minus infinity for tokens not allowed at these positions; float32, on the CPU."""
        return logits.to("cpu", torch.float32).masked_fill(~self.allowed.at(positions), -torch.inf)

    def draw(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[float]]:
        """Draw one residue from each of n distributions.

        Args:
            logits: [n, vocab_size].
            rows: the row of the batch that each distribution belongs to.
            positions: the position that each distribution belongs to.

        Returns:
            Token ids, and their log-probabilities under the model, before temperature, cut-offs and constraints.

        Raises:
            ValueError: the logits are not finite.
        """
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(NOT_FINITE)
        on_host = logits.to("cpu", torch.float32)
        chosen, log_probs = self.choose(on_host, self.allowed.at(positions), self.noise(rows))
        return chosen.tolist(), log_probs.tolist()

    def noise(self, rows: Sequence[int]) -> Tensor | None:
        """Random numbers for `choose`, from the generators of these rows, float32 [n, vocab_size]; None if greedy."""
        if self.greedy:
            return None
        drawn = torch.empty(len(rows), len(self.allowed.everywhere), dtype=torch.float32)
        for own, row in zip(drawn, rows, strict=True):
            own.exponential_(generator=self.generators[row])
        return drawn

    def choose(self, logits: Tensor, allowed: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw residues on any device, without waiting for it.

        With exponential noise e, the index of the largest p / e has the distribution p, as `torch.multinomial` draws
        on a CPU (ATen's `Distributions.cpp`).

        Args:
            logits: finite, float32 [n, vocab_size].
            allowed: bool [n or 1, vocab_size].
            noise: of the rows, see `noise`.

        Returns:
            Token ids and log-probabilities, [n] each.
        """
        scores = logits.masked_fill(~allowed, -torch.inf)
        if noise is not None:
            scores = self.warpers(None, scores).softmax(dim=1) / noise
        chosen = scores.argmax(dim=1)
        return chosen, logits.log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """One seed per row: the given ones, or seeds derived from a single one and the row's index.

    The first row has the single seed itself. So every row can be generated again, alone, from its own seed. Derived
    seeds are below 10^8, which spreadsheets show in full, and differ from each other.

    Raises:
        ValueError: there is not one seed per row, or a seed is negative.
    """
    if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0:
        # The multiples of any number differ modulo a prime.
        first, step = (int(word) for word in np.random.SeedSequence(seed).generate_state(2, np.uint64))
        derived = [(first + (1 + step % (_SEEDS - 1)) * row) % _SEEDS for row in range(rows)]
        return [seed, *derived[1:]] if rows and seed < 2**63 else derived
    if isinstance(seed, Iterable):
        seeds = list(seed)
        if len(seeds) == rows and all(type(one) is int and 0 <= one < 2**63 for one in seeds):
            return seeds
    raise ValueError(f"`seed` must be an integer of at least 0, or one for each of the {rows} rows, got {seed!r}")


def _warpers(options: GenerationOptions) -> LogitsProcessorList:
    """Hugging Face's logits warpers, in the order in which it applies them."""
    warpers = LogitsProcessorList()
    if options.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k is not None:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(float(options.top_p)))
    return warpers


def _residues(name: str, letters: str) -> set[str]:
    """The residues of a string, upper case."""
    if not isinstance(letters, str):
        raise ValueError(f"`{name}` must be a string of residue letters, got {letters!r}")
    unknown = sorted(set(letters.upper()) - set(RESIDUES))
    if unknown:
        raise ValueError(f"`{name}` holds {unknown[0]!r}, which is not a residue code ({RESIDUES})")
    return set(letters.upper())
