"""What shares a forward, and that a row does not depend on what else is in it."""

from __future__ import annotations

import pytest
import torch

from esm_turbo.model.executor import Executor
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.serve import rows as rows_module
from esm_turbo.serve.jobs import ContextGroup
from esm_turbo.serve.rows import run_rows
from esm_turbo.tasks.common.forwards import prefill_ids
from esm_turbo.tasks.scoring.score import TargetRows
from esm_turbo.tasks.variants.score import ProteinRows

# In float32, of log-probabilities: a matrix product adds its terms in an order that depends on its shape.
TOLERANCE = 1e-4
TARGETS = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVG", "GSGSPLLKRRACDEFGHIKLMNPQ"]


@pytest.fixture(scope="module")
def parts(turbo):
    """Rows of several requests: scores on two targets, two of them on the same one, and variants."""
    made, codes = [], turbo.codes
    for target, candidates in ((0, ["ACDEF", "GHIKL"]), (1, ["ACDEF"]), (0, ["WWWWW"]), (1, ["MN"])):
        ids, peptides = codes.encode(TARGETS[target], ""), [codes.encode(one, "") for one in candidates]
        made.append(all_rows(turbo, ("score", target), TargetRows(turbo, ids, peptides, "turbo", "empty", 8)))
    for target in (0, 1):
        protein = TARGETS[target]
        variants = [f"{protein[index]}{1 + index}A" for index in (0, 7, len(protein) - 1)]
        rows = ProteinRows(turbo, protein, variants, "masked", "turbo", 8, 1)
        made.append(all_rows(turbo, ("variants", target), rows))
    return made


def all_rows(turbo, key, item):
    """All rows of an item that has one context."""
    [group] = item.groups
    cache = prefill_ids(turbo, group.context, "turbo")
    cache.crop(group.kept)
    return ContextGroup(group, key, cache, []).rows(torch.arange(group.count))


def predictions(turbo, parts):
    """Of all parts, in their order."""
    found = dict(run_rows(turbo, parts))
    return [found[index] for index in range(len(parts))]


def test_a_row_does_not_depend_on_its_batch(turbo, parts):
    together = predictions(turbo, parts)
    for part, predicted in zip(parts, together, strict=True):
        assert predicted.shape == (len(part), turbo.model.config.vocab_size)
        for number in range(len(part)):
            [alone] = predictions(turbo, [part.split(number)[1].split(1)[0]])
            assert torch.allclose(predicted[number], alone[0], rtol=0, atol=TOLERANCE)


def test_rows_of_one_width_share_a_forward(turbo, parts, monkeypatch):
    original, calls = rows_module.log_probabilities, []

    def counted(turbo, input_ids, at, **options):
        calls.append((len(input_ids), len(set(options.get("context_index", [0])))))
        return original(turbo, input_ids, at, **options)

    monkeypatch.setattr(rows_module, "log_probabilities", counted)
    predictions(turbo, parts)
    # Scores of five residues on two contexts, of two residues, and variants of two proteins.
    assert sorted(calls) == [(2, 1), (6, 2), (20, 2)]


def test_contexts_are_read_in_turn_where_graphs_are_replayed(turbo, parts, monkeypatch):
    together = predictions(turbo, parts)
    original, calls = rows_module.log_probabilities, []

    def counted(turbo, input_ids, at, **options):
        calls.append(len(input_ids))
        assert "context_index" not in options
        return original(turbo, input_ids, at, **options)

    monkeypatch.setattr(rows_module, "log_probabilities", counted)
    esm = type(turbo.model.base_model)
    assert not turbo.model.base_model.replays
    monkeypatch.setattr(esm, "replays", True)
    # There are no graphs on a CPU.
    monkeypatch.setattr(Executor, "addresses", lambda self: None)
    in_turn = predictions(turbo, parts)
    # Rows of requests on the same context share a forward still.
    assert sorted(calls) == [2, 3, 3, 5, 15]
    # Each has its predictions before the next one runs.
    calls.clear()
    next(run_rows(turbo, parts))
    assert len(calls) == 1
    for one, other in zip(together, in_turn, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=TOLERANCE)


def test_what_does_not_fit_is_halved(turbo, parts, monkeypatch):
    expected = predictions(turbo, parts)
    original, sizes = rows_module.log_probabilities, []

    def small(turbo, input_ids, at, **options):
        if len(input_ids) > 2:
            raise NotEnoughMemoryError("too much")
        sizes.append(len(input_ids))
        return original(turbo, input_ids, at, **options)

    monkeypatch.setattr(rows_module, "log_probabilities", small)
    for own, theirs in zip(predictions(turbo, parts), expected, strict=True):
        assert torch.allclose(own, theirs, rtol=0, atol=TOLERANCE)
    assert sum(sizes) == sum(map(len, parts))
    monkeypatch.setattr(rows_module, "log_probabilities", lambda *_, **__: small(turbo, range(3), None))
    with pytest.raises(NotEnoughMemoryError):
        predictions(turbo, parts)
