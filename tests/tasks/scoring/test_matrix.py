"""Candidates against targets as a matrix."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo import TurboEsm
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.scoring.matrix import ScoreMatrix
from esm_turbo.tasks.scoring.records import Candidate, score_records
from esm_turbo.tasks.scoring.score import CandidateScore, Scores
from esm_turbo.tasks.scoring.specificity import BackgroundFigures


def scores(values: dict[str, float], background: bool = False) -> Scores:
    figures = BackgroundFigures(-3.0, 0.0, 1) if background else None
    own = tuple(CandidateScore(name, (value,) * len(name), figures) for name, value in values.items())
    return Scores(own, "turbo", "turbo3", "masked", 8, "m", "alone" if background else None)


def test_rows_are_targets_and_columns_candidates(tmp_path: Path) -> None:
    pairs = [("a", scores({"KR": -1.0, "W": -2.0})), ("b", scores({"W": -4.0, "P": -0.5}))]
    matrix = ScoreMatrix.of(pairs, {"KR": "first", "W": "second", "P": "third"})
    assert matrix.columns() == ["target", "number", "first", "second", "third"] and matrix.by == "likelihood"
    expected = [("a", [-1.0, -2.0, None]), ("b", [None, -4.0, -0.5])]
    assert list(matrix.rows()) == [[name, "mean log p (nats per residue)", *own] for name, own in expected]
    assert matrix.to_frame().set_index("target").loc["b", "third"] == -0.5
    matrix.write(tmp_path / "m.csv")
    with open(tmp_path / "m.csv") as file:
        assert [row["first"] for row in csv.DictReader(file)] == ["-1.0", ""]
    # Names that are not unique are of no use.
    assert ScoreMatrix.of(pairs, {"KR": "x", "W": "x"}).candidates == ("KR", "W", "P")
    for column in ("target", "number"):
        assert ScoreMatrix.of(pairs, {"KR": column}).candidates == ("KR", "W", "P")
    with pytest.raises(ValueError, match="'specificity' needs scores with a `background`"):
        ScoreMatrix.of(pairs, by="specificity")


def test_specificity_is_shown_where_it_is_known() -> None:
    pairs = [("a", scores({"KR": -1.0}, background=True))]
    assert ScoreMatrix.of(pairs).values.tolist() == [[2.0]]
    assert ScoreMatrix.of(pairs, by="likelihood").values.tolist() == [[-1.0]]


@pytest.mark.parametrize(("contexts", "unit"), [((9, 9), "s.d."), ((9, 4), "nats"), ((4, 4), "nats")])
def test_the_number_that_ranks_is_in_the_cells_with_its_unit(contexts: tuple[int, int], unit: str) -> None:
    pairs = []
    for name, count in zip("ab", contexts, strict=True):
        # By nats KR is best, by standard deviations W.
        figures = {"KR": BackgroundFigures(-3.0, 2.0, count), "W": BackgroundFigures(-3.5, 0.5, count)}
        pairs.append((name, scores({"KR": -1.0, "W": -2.0}).with_background(figures, "targets")))
    matrix = ScoreMatrix.of(pairs)
    assert matrix.unit == unit
    assert matrix.values.tolist() == ([[1.0, 3.0]] * 2 if unit == "s.d." else [[2.0, 1.5]] * 2)
    name = "standard deviations" if unit == "s.d." else "nats per residue"
    assert (
        {row[1] for row in matrix.rows()}
        == {matrix.label}
        == {f"specificity against {'4 to 9' if len(set(contexts)) > 1 else contexts[0]} other targets ({name})"}
    )
    assert matrix.clustered().unit == unit
    if len(set(contexts)) == 1:
        best = [own.ranking("specificity")[0] for _, own in pairs]
        assert matrix.values.argmax(axis=1).tolist() == best


@given(st.lists(st.lists(st.floats(-5, 0) | st.just(math.nan), min_size=4, max_size=4), min_size=1, max_size=6))
def test_clustering_moves_whole_rows_and_columns(rows: list[list[float]]) -> None:
    values = np.array(rows)
    names = tuple(map(str, range(len(rows))))
    found = ScoreMatrix(names, ("p", "q", "r", "s"), values, "likelihood").clustered()
    assert sorted(found.targets) == list(names) and sorted(found.candidates) == ["p", "q", "r", "s"]
    order = [int(name) for name in found.targets], ["pqrs".index(name) for name in found.candidates]
    np.testing.assert_array_equal(found.values, values[np.ix_(*order)])


def test_similar_rows_are_neighbours_and_the_best_candidates_are_kept() -> None:
    values = np.array([[0.0, -9.0, -1.0], [-5.0, -9.0, -6.0], [0.1, -9.0, -1.0]])
    found = ScoreMatrix(("a", "b", "c"), ("p", "q", "r"), values, "likelihood").clustered(2)
    assert set(found.candidates) == {"p", "r"}
    assert abs(found.targets.index("a") - found.targets.index("c")) == 1


def test_matrices_of_runs_and_of_pairs_agree(turbo: TurboEsm) -> None:
    targets, candidates = ["MKTAYIAK", "GSWKDLAEG"], ["KR", "WWP"]
    pairs = turbo.score_pairs(targets, candidates)
    run = score_records(
        turbo,
        [ProteinRecord(f"t{n}", one) for n, one in enumerate(targets)],
        [Candidate(f"c{n}", one) for n, one in enumerate(candidates)],
        ["turbo"],
    )
    ours = pairs.matrix("likelihood")
    assert (ours.targets, ours.candidates) == (("0", "1"), ("KR", "WWP"))
    assert (run.matrix().targets, run.matrix().candidates) == (("t0", "t1"), ("c0", "c1"))
    np.testing.assert_allclose(run.matrix().values, ours.values, atol=1e-5)
    own = {"t0": ["KR"], "t1": ["WWP", "KR"]}
    named = [Candidate(f"{target}-{one}", one, target) for target, ones in own.items() for one in ones]
    run = score_records(
        turbo, [ProteinRecord(one, two) for one, two in zip(own, targets, strict=True)], named, ["turbo"]
    )
    assert run.matrix("likelihood").candidates == ("t0-KR, t1-KR", "t1-WWP")
    assert pairs.matrix().by == "specificity"
    expected = [[one.specificity for one in pairs[index].scores] for index in range(2)]
    assert pairs.matrix().values.tolist() == expected
