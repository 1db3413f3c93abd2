"""Peptides for a target by the recipe of PepMLM (Chen et al. 2024, arXiv:2310.03842): generated, then ranked.

The target is followed by one mask per residue of the peptide, and each residue is drawn from the k most likely ones.
The peptides are then scored as candidates on the target, see `tasks.scoring.score`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common.checks import check_count
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.options import Arm
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.generation.generate import GenerationOptions, generate
from esm_turbo.tasks.generation.sampling import row_seeds
from esm_turbo.tasks.scoring.score import CandidateScore, score

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

DEFAULT_BINDER_TOP_K = 3
"""Most likely residues that a peptide's residues are drawn from, as in PepMLM."""


@dataclass(frozen=True)
class Binder:
    """A generated peptide.

    Attributes:
        score: its score on the target.
        mean_log_prob: mean log-probability of its residues when they were drawn, nats.
        seed: of its row, see `generate`.
    """

    score: CandidateScore
    mean_log_prob: float
    seed: int

    @property
    def sequence(self) -> str:
        """Its residues."""
        return self.score.candidate


@dataclass(frozen=True)
class Binders(Tabular):
    """Generated peptides for one target, lowest pseudo-perplexity first; each sequence once.

    Attributes:
        target: residues of the target.
        binders: the peptides.
        arm: of the scores.
        preset: storage format of the target's contexts; None for `full`.
        model: name of the model.
    """

    target: str
    binders: tuple[Binder, ...]
    arm: Arm
    preset: str | None
    model: str

    def __repr__(self) -> str:
        best = [f"best {self.binders[0].sequence}"] if self.binders else []
        return named(
            self, counted(len(self.binders), "binder"), *best, model=self.model, arm=self.arm, preset=self.preset
        )

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["rank", "binder", "pseudo_perplexity", "pseudo_log_likelihood", "mean_log_prob", "seed"]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per peptide its rank, residues, score, and what it was drawn with."""
        for rank, one in enumerate(self.binders, start=1):
            figures = one.score.pseudo_perplexity, one.score.pseudo_log_likelihood, one.mean_log_prob
            yield rank, one.sequence, *figures, one.seed

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        binders = [dict(zip(self.columns(), row, strict=True)) for row in self.rows()]
        for row, one in zip(binders, self.binders, strict=True):
            row["log_probabilities"] = list(one.score.log_probabilities)
        return {"model": self.model, "arm": self.arm, "preset": self.preset, "binders": binders}


def generate_binders(
    turbo: ContextModel,
    target: str | ProteinRecord,
    length: int,
    *,
    num_return_sequences: int = 4,
    top_k: int | None = DEFAULT_BINDER_TOP_K,
    top_p: float = 1.0,
    temperature: float = 1.0,
    per_step: int | None = None,
    sweeps: int = 1,
    allowed: str | None = None,
    banned: str = "",
    seed: int = 0,
    arm: Arm | None = None,
    refresh: int = DEFAULT_REFRESH,
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
) -> Binders:
    """Generate peptides after a target, and rank them by pseudo-perplexity.

    Args:
        target: residues of the target.
        length: residues per peptide.
        num_return_sequences: peptides to draw; equal ones are returned once.
        per_step: residues drawn per step; None draws all at once, independently of each other, as PepMLM does, and 1
            each given those before it.
        allowed: residues that may be generated; None for the 20 standard ones.
        arm: of the scores, as are `refresh` and `store`; see `tasks.scoring.score.score`.
        toks_per_batch: padded tokens per batch; None chooses by device, and to score by arm too.
        progress: called with stages `generate` and `score`, see `Progress`.

    The other arguments are those of `tasks.generation.options.GenerationOptions`.

    Raises:
        ValueError: the target is invalid, or an option is out of range.
        NotEnoughMemoryError: the target needs more memory than is free.
    """
    check_count("length", length)
    check_count("num_return_sequences", num_return_sequences)
    if toks_per_batch is not None:
        check_count("toks_per_batch", toks_per_batch)
    ids = turbo.codes.encode(target, "the target")
    residues = turbo.codes.decode(ids)
    options = GenerationOptions(
        # Masks of the target stay.
        positions=list(range(len(ids) + 1, len(ids) + length + 1)),
        per_step=length if per_step is None else per_step,
        sweeps=sweeps,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        allowed=allowed,
        banned=banned,
    )
    masked, seeds = residues + "<mask>" * length, row_seeds(seed, num_return_sequences)
    counter = StageProgress(progress, "generate", num_return_sequences)
    size = max(1, protein_tokens(toks_per_batch, turbo) // (len(residues) + length + 2))
    drawn: dict[str, tuple[float, int]] = {}
    for begin in range(0, num_return_sequences, size):
        own = seeds[begin : begin + size]
        output = generate(turbo, [masked] * len(own), options, own)
        for peptide, mean, one in zip(output.new_residues, output.mean_log_probs, own, strict=True):
            drawn.setdefault(peptide, (mean, one))
        counter.advance(len(own))
    candidates = list(drawn)
    found = score(
        turbo,
        residues,
        candidates,
        arm=arm,
        refresh=refresh,
        toks_per_batch=toks_per_batch,
        store=store,
        progress=progress,
    )
    ranked = [found.scores[index] for index in found.ranking()]
    return Binders(
        residues, tuple(Binder(one, *drawn[one.candidate]) for one in ranked), found.arm, found.preset, found.model
    )
