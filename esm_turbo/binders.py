"""Peptides for a target by the recipe of PepMLM (Chen et al. 2024, arXiv:2310.03842): generated, then ranked.

The target is followed by one mask per residue of the peptide, and each residue is drawn from the k most likely ones.
A template keeps residues of the peptide, or allows only some at a position. The peptides are then scored as candidates
on the target, see `tasks.scoring.pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.files.tabular import Tabular, counted, named
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord
from esm_turbo.tasks.common.checks import check_count
from esm_turbo.tasks.common.context_sources import ReadableSource
from esm_turbo.tasks.common.forwards import protein_tokens
from esm_turbo.tasks.common.options import Arm, Background, SortBy
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.generation.generate import GenerationOptions, generate_batch
from esm_turbo.tasks.generation.notation import parse_template
from esm_turbo.tasks.generation.sampling import row_seeds
from esm_turbo.tasks.scoring.pairs import check_ranking, score
from esm_turbo.tasks.scoring.score import SPECIFICITY_COLUMNS, CandidateScore, Scores

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
    """Generated peptides for one target, best first; each sequence once.

    Attributes:
        target: residues of the target.
        binders: the peptides.
        scores: theirs on the target, in the same order; with `rescored`, of the best by the arm `full`, too.
    """

    target: str
    binders: tuple[Binder, ...]
    scores: Scores

    @property
    def sort_by(self) -> SortBy:
        """What ranks them."""
        return self.scores.sort_by

    @property
    def arm(self) -> Arm:
        """Of the scores."""
        return self.scores.arm

    @property
    def preset(self) -> str | None:
        """Storage format of the target's contexts; None for `full`."""
        return self.scores.preset

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.scores.model

    @property
    def background(self) -> str | None:
        """What peptides were compared with for their specificity: `alone`, `decoys`, or None."""
        return self.scores.background

    def __repr__(self) -> str:
        best = [f"best {self.binders[0].sequence}"] if self.binders else []
        return named(
            self, counted(len(self.binders), "binder"), *best, model=self.model, arm=self.arm, preset=self.preset
        )

    def columns(self) -> list[str]:
        """Names of the columns of `rows`."""
        figures = ["pseudo_perplexity", "pseudo_log_likelihood", *self._more(SPECIFICITY_COLUMNS)]
        return ["rank", "binder", *figures, "mean_log_prob", "seed", *self.scores.rescored_columns()]

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Per peptide its rank, residues, score, what it was drawn with, and what it was scored again with."""
        exact = self.scores.rescored_cells()
        for rank, (one, again) in enumerate(zip(self.binders, exact, strict=True), start=1):
            figures = one.score.pseudo_perplexity, one.score.pseudo_log_likelihood
            more = self._more((one.score.specificity, one.score.specificity_z))
            yield rank, one.sequence, *figures, *more, one.mean_log_prob, one.seed, *again

    def _more(self, columns: Sequence[object]) -> list[Any]:
        return [] if self.background is None else list(columns)

    def fasta(self, name: str) -> str:
        """FASTA entries named by the target and the rank, whose headers give the number that ranks."""
        number, values = "pseudo_perplexity", list[float | None](self.scores.pseudo_perplexities)
        if self.sort_by == "specificity":
            unit, values = self.scores.specificities()
            number = "specificity_z" if unit == "s.d." else "specificity"
        ranked = enumerate(zip(self.binders, values, strict=True), start=1)
        return "".join(f">{name}_{rank} {number}={value}\n{one.sequence}\n" for rank, (one, value) in ranked)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        binders = [dict(zip(self.columns(), row, strict=True)) for row in self.rows()]
        for row, one in zip(binders, self.binders, strict=True):
            row["log_probabilities"] = list(one.score.log_probabilities)
        fields = {"model": self.model, "arm": self.arm, "preset": self.preset, "background": self.background}
        fields["sort_by"] = self.sort_by
        return {**fields, "binders": binders}


def generate_binders(
    turbo: ContextModel,
    target: str | ProteinRecord,
    length: int | None = None,
    *,
    template: str | None = None,
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
    background: Background | Sequence[str] = "none",
    rescore: int = 0,
    sort_by: SortBy = "likelihood",
    toks_per_batch: int | None = None,
    store: ReadableSource | None = None,
    progress: Progress | None = None,
) -> Binders:
    """Generate peptides after a target, and rank them by pseudo-perplexity or specificity.

    Args:
        target: residues of the target.
        length: residues per peptide; None is that of the template.
        template: residues that peptides have or may have, such as `GX[KR]XXP`, see `parse_template`. Those that it
            names alone are given, and seen while the others are drawn.
        num_return_sequences: peptides to draw; equal ones are returned once.
        per_step: residues drawn per step; None draws all at once, independently of each other, as PepMLM does, and 1
            each given those before it.
        allowed: residues that may be generated, where a template has X, too; None for the 20 standard ones.
        arm: of the scores, as are `refresh`, `background`, `rescore` and `store`; see `tasks.scoring.pairs.score`.
        sort_by: figure that ranks the peptides; `specificity` needs a background.
        toks_per_batch: padded tokens per batch; None chooses by device, and to score by arm too.
        progress: called with stages `generate`, `score` and, with `rescore`, `rescore`, see `Progress`.

    The other arguments are those of `tasks.generation.options.GenerationOptions`.

    Raises:
        ValueError: the target or the template is invalid, or an option is out of range.
        NotEnoughMemoryError: the target needs more memory than is free.
    """
    places = _places(length, template, allowed)
    check_ranking(arm, rescore, sort_by, background)
    check_count("num_return_sequences", num_return_sequences)
    ids = turbo.codes.encode(target, "the target")
    residues = turbo.codes.decode(ids)
    # Masks of the target stay.
    kept = [template is not None and len(own) == 1 for own in places]
    drawn_at = {len(ids) + 1 + index: own for index, own in enumerate(places) if not kept[index]}
    options = GenerationOptions(
        positions=list(drawn_at),
        per_step=len(drawn_at) if per_step is None else per_step,
        sweeps=sweeps,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        allowed=drawn_at,
        banned=banned,
    )
    masked = residues + "".join(own if keep else "<mask>" for own, keep in zip(places, kept, strict=True))
    seeds = row_seeds(seed, num_return_sequences)
    counter = StageProgress(progress, "generate", num_return_sequences * len(places))
    size = max(1, protein_tokens(toks_per_batch, turbo) // (len(residues) + len(places) + 2))
    drawn: dict[str, tuple[float, int]] = {}
    for begin in range(0, num_return_sequences, size):
        own = seeds[begin : begin + size]
        output = generate_batch(turbo, [masked] * len(own), options, own)
        for peptide, mean, one in zip(output.sequences, output.mean_log_probs, own, strict=True):
            drawn.setdefault(peptide[-len(places) :], (mean, one))
        counter.advance(len(own) * len(places))
    candidates = list(drawn)
    found = score(
        turbo,
        residues,
        candidates,
        arm=arm,
        refresh=refresh,
        background=background,
        rescore=rescore,
        sort_by=sort_by,
        toks_per_batch=toks_per_batch,
        store=store,
        progress=progress,
    )
    ranked = found.ordered(found.ranking())
    return Binders(residues, tuple(Binder(one, *drawn[one.candidate]) for one in ranked.scores), ranked)


def _places(length: int | None, template: str | None, allowed: str | None) -> list[str]:
    """Residues that each position of a peptide may have.

    Raises:
        ValueError: there is neither a length nor a template, they differ, or there is nothing to draw.
    """
    anything = STANDARD_RESIDUES if allowed is None else allowed.upper()
    if template is None:
        if length is None:
            raise ValueError("give the `length` of the peptides, or a `template`")
        check_count("length", length)
        return [anything] * length
    places = parse_template(template, anything)
    if length not in (None, len(places)):
        raise ValueError(f"`length` is {length}, but `template` has {counted(len(places), 'residue')}; leave one out")
    if all(len(own) == 1 for own in places):
        raise ValueError(f"`template` {template!r} leaves nothing to draw; X stands for any residue")
    return places
