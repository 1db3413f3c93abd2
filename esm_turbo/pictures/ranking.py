"""The ranking of candidates on a target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esm_turbo.files.tabular import counted
from esm_turbo.pictures.panels import Bars, Heatmap, Histogram, Panel, Scatter, Sheet, Table
from esm_turbo.tasks.scoring.matrix import UNIT_NAMES
from esm_turbo.tasks.scoring.records import Candidate, ScoringRun, TargetResult
from esm_turbo.tasks.scoring.score import CandidateScore, left_out

_BEST = 20
_PERPLEXITY = "pseudo-perplexity (lower is better)"
_LIKELIHOOD = "mean log p (nats per residue, higher is better)"
# Candidates of a heat map, and rows: more could not be read.
_COLUMNS, _ROWS = 100, 60


def ranking_sheet(result: TargetResult, used: str) -> Sheet:
    """The best candidates, all scores, log-probabilities of residues, and how well the arms agree.

    Args:
        result: the scores on one target; its reference arm ranks.
        used: what they were computed with.
    """
    arm = result.reference
    scores = result.scores[arm]
    unit, found = scores.specificities()
    # Candidates of one target alone may have none.
    if result.sort_by == "specificity" and any(one is not None for one in found):
        values = np.array(found, dtype=np.float64)
        label = f"specificity against {scores.compared_with} ({UNIT_NAMES[unit or 'nats']}, higher is better)"
        bars, bar_label = values, label
    else:
        values, label = np.array([one.mean_log_probability for one in scores.scores]), _LIKELIHOOD
        bars, bar_label = np.array(scores.pseudo_perplexities), _PERPLEXITY
    best = [index for index in result.ranking() if np.isfinite(values[index])][:_BEST]
    names = [result.candidates[index].label for index in best]
    hover = [_with_residues(result.candidates[index]) for index in best]
    values = values[np.isfinite(values)]
    layout: list[Sequence[Panel]] = [
        [
            Bars(names, bars[best], bar_label, f"best {len(best)}, {arm}", hover),
            _residues([scores.scores[index] for index in best], names),
        ]
    ]  # fmt: skip
    marks = {"best": float(values.max()), "median": float(np.median(values))}
    # Of few candidates, the bars are the whole distribution.
    below: list[Panel] = [Histogram(values, label, marks, "candidates")] if len(values) > _BEST else []
    below += _agreement(result)
    layout += [below] if below else []
    target = result.target
    size = counted(len(result.candidates), "candidate")
    # Scores alone do not know their target.
    if target.sequence:
        size += f", target of {counted(len(target.sequence), 'residue')}"
    caption = (
        f"{used}. Ranked by the arm {arm}. Letters are the candidates' residues, their colours log p of each while it"
        " was masked; brighter is more likely."
    )
    return Sheet(f"{target.id}: {size}", caption, layout, Table(result.columns(), list(result.rows())))


def has_matrix(targets: int, candidates: int) -> bool:
    """Whether so many of each are drawn as a heat map."""
    return 2 <= targets <= _ROWS and candidates >= 2


def matrix_sheet(run: ScoringRun, used: str) -> Sheet | None:
    """All targets against the candidates, by the number that ranks; None of fewer than two of either."""
    whole = run.matrix()
    if not has_matrix(*whole.values.shape):
        return None
    shown = whole.clustered(_COLUMNS)
    specific = whole.by == "specificity"
    first = {one.sequence: one for result in reversed(run.results) for one in reversed(result.candidates)}
    # A matrix names its columns by names, or all by residues.
    names = run.candidate_names()
    named = {names.get(sequence, sequence): one for sequence, one in first.items()}
    known = named if len(named) == len(first) and set(shown.candidates) <= named.keys() else first
    own = [known[name] for name in shown.candidates]
    heat = Heatmap(
        shown.values,
        list(shown.targets),
        [_column_label(name, one) for name, one in zip(shown.candidates, own, strict=True)],
        shown.label,
        "candidate",
        "target",
        centred=specific,
        names=[[f"{_with_residues(one)} on {row}, {shown.label}" for one in own] for row in shown.targets],
    )
    caption = f"{used}. Similar targets, and similar candidates, lie beside each other."
    if specific:
        caption += " Blue is more likely on this target than on the background, red less."
    elif any(result.scores[result.reference].background is not None for result in run.results):
        caption += " --sort-by specificity draws which candidates are more likely on one target than on others."
    if len(shown.candidates) < len(whole.candidates):
        caption += f" The {len(shown.candidates)} candidates of the highest values on any target are shown."
    title = f"{counted(len(whole.candidates), 'candidate')} on {counted(len(whole.targets), 'target')}"
    return Sheet(title, caption, [[heat]], Table(whole.columns(), list(whole.rows())), summary=True)


def _column_label(name: str, candidate: Candidate) -> str:
    """A short text for a column of a matrix, which has this name, of a candidate of perhaps several identifiers."""
    if name == candidate.sequence:
        return candidate.residues
    return candidate.label if name == candidate.name else f"{candidate.label}, ..."


def _with_residues(candidate: Candidate) -> str:
    """What hovering shows of a candidate: its name, if it has one, and its residues."""
    return f"{candidate.name} {candidate.sequence}" if candidate.name else candidate.sequence


def _residues(scores: Sequence[CandidateScore], names: Sequence[str]) -> Heatmap:
    """Log-probabilities of the residues of candidates, one below the other; residues left out have no colour."""
    sequences = [one.candidate for one in scores]
    width = max(map(len, sequences))
    values = np.full((len(sequences), width), np.nan)
    for row, one in enumerate(scores):
        values[row, : len(one.candidate)] = one.log_probabilities
        without = left_out(one.unknown_residues)
        values[row, [column for column, residue in enumerate(one.candidate) if residue in without]] = np.nan
    hover = [
        [f"{name}, {residue}{number}" for number, residue in enumerate(sequence.ljust(width), start=1)]
        for name, sequence in zip(names, sequences, strict=True)
    ]
    return Heatmap(values, [""] * len(sequences), list(range(1, width + 1)), "log p (nats)", "residue of the candidate",
                   names=hover, letters=list(sequences), missing=False)  # fmt: skip


def _agreement(result: TargetResult) -> list[Scatter]:
    """Every other arm against the reference."""
    reference = result.scores[result.reference]
    names = [f"{one.id} {one.sequence}" for one in result.candidates]
    panels = []
    for arm, found in result.agreement.items():
        correlation = "" if found.spearman is None else f"Spearman {found.spearman:.3f}, "
        shared = f"{100 * found.top_k_overlap:.0f} % of the best {found.top_k} shared"
        title = f"{arm} against {result.reference}\n{correlation}{shared}"
        x, y = (np.array([s.mean_log_probability for s in one.scores]) for one in (reference, result.scores[arm]))
        x_label, y_label = (f"mean log p, {name} (nats per residue)" for name in (result.reference, arm))
        panels.append(Scatter(x, y, names, x_label, y_label, title, diagonal=True))
    return panels
