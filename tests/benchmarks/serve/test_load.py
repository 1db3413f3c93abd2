"""The load on the service, in its short form: every answer is the library's, however requests come."""

import pytest

from benchmarks.serve.load import Load
from benchmarks.serve.workload import Library, answered, asks, difference, proteins
from tests.helpers.service import running

KINDS = ("score", "variants", "embeddings", "generate")


@pytest.fixture(scope="module")
def work(turbo, tmp_path_factory):
    targets = proteins(4, seed=1, shortest=30, longest=60)
    made = asks(targets, 20, 2, turbo.name)
    # Two of each kind, where there are so many.
    work = [ask for kind in KINDS for ask in [one for one in made if one.kind == kind][:2]]
    assert {ask.kind for ask in work} == set(KINDS)
    library = Library(turbo, targets)
    return targets, work, [library.values(ask) for ask in work]


def test_answers_under_load_are_those_of_the_library(turbo, tmp_path, work):
    targets, work, expected = work
    with running(turbo, tmp_path / "store") as client:
        keys = [client.add(target) for target in targets]
        load = Load(work, expected, keys)
        together = load.busy(client.port, clients=8, seconds=1)
        apart = load.steady(client.port, rate=5, seconds=1, seed=3)
        wrong = Load(work, [[0.0]] * len(work), keys).busy(client.port, clients=1, seconds=0.01)
    for outcome in (together, apart):
        assert outcome.errors == []
        assert outcome.worst < 1e-3
    assert together.count >= 8
    # What compares them would notice.
    assert wrong.worst > 1


def test_errors_are_noted(turbo, tmp_path, work):
    targets, work, expected = work
    with running(turbo, tmp_path / "store") as client:
        scores = [ask for ask in work if ask.kind == "score"][:1]
        outcome = Load(scores, expected, ["0" * 64] * len(targets)).busy(client.port, clients=1, seconds=0.01)
    assert outcome.count == 0
    assert outcome.errors and outcome.errors[0].startswith("score: 404")


def test_answers_of_other_lengths_differ():
    assert difference("score", [1.0], [1.0, 2.0]) == (float("inf"), False)
    assert difference("score", [1.0, 2.0], [1.0, 2.5]) == (0.5, False)
    assert answered("variants", {"variants": [{"score": 1.5}]}) == [1.5]


def test_generated_residues_are_compared_up_to_the_first_that_differs():
    same, tie, wrong = [-1.0, -2.0, -3.0], [-1.0, -2.125, -9.0], [-1.5, -2.125, -9.0]
    first, second = ([float(ord(residue)) for residue in residues] for residues in ("GPA", "GEA"))
    assert difference("generate", same + first, tie + first) == (6.0, False)
    # Rounding selected another residue, and what follows it is not compared.
    assert difference("generate", same + first, tie + second) == (0.125, True)
    assert difference("generate", same + first, wrong + second) == (0.5, True)
