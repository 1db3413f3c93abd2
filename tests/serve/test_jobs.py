"""Jobs in pieces: results are the library's, however they are cut and with whatever they share a batch."""

from __future__ import annotations

import pytest
import torch

from esm_turbo import ContextStore
from esm_turbo.model.executor import Executor
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.jobs import ContextJob, EmbedJob, GenerateJob, ItemJob
from esm_turbo.tasks.common import row_engine
from esm_turbo.tasks.generation.generate import GenerationOptions
from esm_turbo.tasks.scoring.score import TargetRows
from esm_turbo.tasks.variants.score import ProteinRows

# In float32, of log-probabilities: a matrix product adds its terms in an order that depends on its shape.
TOLERANCE = 1e-4
TARGETS = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVG", "GSGSPLLKRRACDEFGHIKLMNPQ"]
CANDIDATES = [["ACDEF", "GHIKL"], ["ACDEF"], ["WWWWW", "MN", "GSGSWKDLAE"]]


@pytest.fixture
def contexts(turbo, tmp_path):
    with ContextStore(tmp_path / "store") as store:
        yield Contexts(turbo, store)


def score_jobs(turbo):
    """Scores on two targets, of which one is asked for twice."""
    made = []
    for number, candidates in enumerate(CANDIDATES):
        ids, peptides = turbo.codes.encode(TARGETS[number % 2], ""), [turbo.codes.encode(x, "") for x in candidates]
        made.append(ItemJob("score", TargetRows(turbo, ids, peptides, "turbo", "empty", 8), "turbo"))
    return made


def variant_jobs(turbo):
    return [ItemJob("variants", ProteinRows(turbo, x, None, "masked", "turbo", 8, 1), "turbo") for x in TARGETS]


def run(jobs, turbo, contexts, tokens):
    """Run jobs in pieces of so many tokens that share batches; the number of these."""
    batches = 0
    while taken := [(job, *job.take(turbo, contexts, tokens)) for job in jobs if job.left]:
        assert all(size > 0 for *_, size in taken)
        for index, found in jobs[0].run(turbo, contexts, [work for _, work, _ in taken]):
            taken[index][0].put(found)
        batches += 1
        assert batches < 1000
    return batches


@pytest.mark.parametrize(("tokens", "fewest", "most"), [(1, 40, 1000), (100, 5, 40), (10_000, 1, 1)])
def test_scores_are_the_librarys(turbo, contexts, tokens, fewest, most):
    scores, variants = score_jobs(turbo), variant_jobs(turbo)
    assert fewest <= run([*scores, *variants], turbo, contexts, tokens) <= most
    for number, job in enumerate(scores):
        expected = turbo.score(TARGETS[number % 2], CANDIDATES[number], place="empty")
        assert [one.candidate for one in job.result().scores] == CANDIDATES[number]
        for own, theirs in zip(job.result().scores, expected.scores, strict=True):
            assert own.log_probabilities == pytest.approx(theirs.log_probabilities, abs=TOLERANCE)
    for target, job in zip(TARGETS, variants, strict=True):
        assert job.result().values == pytest.approx(turbo.score_variants(target).values, abs=2 * TOLERANCE)
    assert all(job.done == job.tokens for job in (*scores, *variants))
    # The contexts of one target were computed once for all who asked.
    assert scores[2].ran == scores[2].tokens - 1 - len(TARGETS[0]) and variants[0].ran == variants[0].tokens


def test_contexts_are_read_in_turn_where_graphs_are_replayed(turbo, contexts, monkeypatch):
    jobs = score_jobs(turbo)
    expected = turbo.score(TARGETS[1], CANDIDATES[1], place="empty").pseudo_perplexities
    original, calls = row_engine.log_probabilities, []

    def counted(turbo, input_ids, at, **options):
        calls.append(len(input_ids))
        assert options["context_index"] is None
        return original(turbo, input_ids, at, **options)

    monkeypatch.setattr(row_engine, "log_probabilities", counted)
    assert not turbo.model.base_model.replays
    monkeypatch.setattr(type(turbo.model.base_model), "replays", True)
    # There are no graphs on a CPU.
    monkeypatch.setattr(Executor, "addresses", lambda self: None)
    found = jobs[0].run(turbo, contexts, [job.take(turbo, contexts, 10_000)[0] for job in jobs])
    # Each has its predictions before the next one runs; rows of requests on the same context share a forward still.
    index, first = next(found)
    assert index in (0, 2) and len(calls) < 4
    jobs[index].put(first)
    for index, one in found:
        jobs[index].put(one)
    assert jobs[1].result().pseudo_perplexities == pytest.approx(expected, rel=TOLERANCE)


def test_what_does_not_fit_runs_in_smaller_batches(turbo, contexts, monkeypatch):
    expected = turbo.score(TARGETS[0], CANDIDATES[0], place="empty").pseudo_perplexities
    original, sizes = row_engine.log_probabilities, []

    def small(turbo, input_ids, at, **options):
        if len(input_ids) > 2:
            raise NotEnoughMemoryError("too much")
        sizes.append(len(input_ids))
        return original(turbo, input_ids, at, **options)

    monkeypatch.setattr(row_engine, "log_probabilities", small)
    [job, *_] = score_jobs(turbo)
    run([job], turbo, contexts, 10_000)
    assert sum(sizes) == 10
    assert job.result().pseudo_perplexities == pytest.approx(expected, rel=TOLERANCE)
    monkeypatch.setattr(row_engine, "log_probabilities", lambda *_, **__: small(turbo, range(3), None))
    with pytest.raises(NotEnoughMemoryError):
        run(score_jobs(turbo), turbo, contexts, 10_000)


@pytest.mark.parametrize(("tokens", "batches"), [(1, 3), (60, 2), (10_000, 1)])
def test_embeddings_are_cut_between_sequences(turbo, contexts, tokens, batches):
    sequences = [*TARGETS, "ACD"]
    jobs = [EmbedJob(sequences, 2), EmbedJob(sequences[:1], 2)]
    assert run(jobs, turbo, contexts, tokens) == batches
    for job, own in zip(jobs, (sequences, sequences[:1]), strict=True):
        for mean, embedding in zip(job.result(), turbo.embed(own, include=["mean"]), strict=True):
            [expected] = embedding.mean_representations.values()
            assert torch.allclose(mean, expected, rtol=0, atol=TOLERANCE)
        assert job.done == job.tokens
    assert [job.ran for job in jobs] == [jobs[0].tokens, 0]


def test_stored_contexts_are_not_counted_as_run(turbo, contexts):
    contexts.add(TARGETS[:1])
    jobs = [ContextJob(sequence) for sequence in (*TARGETS, TARGETS[1])]
    assert run(jobs, turbo, contexts, 10_000) == 1
    assert [job.ran for job in jobs] == [0, len(TARGETS[1]) + 1, 0]
    assert [job.done for job in jobs] == [job.tokens for job in jobs]


@pytest.mark.parametrize("tokens", [1, 30, 10_000])
@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 6, "num_return_sequences": 3, "top_k": 5}, {"positions": [2, 5, 9], "num_return_sequences": 3}],
)
def test_generation_is_cut_between_samples_and_steps(turbo, contexts, tokens, options):
    job = GenerateJob(
        TARGETS[1], len(TARGETS[1]), 2, GenerationOptions(**options), 7, stored="max_new_tokens" in options
    )
    pieces = run([job], turbo, contexts, tokens)
    expected = turbo.generate(TARGETS[1], seed=7, **options)
    assert (job.result().sequences, job.result().positions) == (expected.sequences, expected.positions)
    assert (pieces > 8) == (tokens == 1) and (pieces == 1) == (tokens == 10_000)
    assert job.ran == job.done > 0


def test_contexts_of_several_requests_are_stored_at_once(turbo, contexts):
    jobs = [ContextJob(sequence) for sequence in (*TARGETS, TARGETS[0])]
    assert run(jobs, turbo, contexts, 10_000) == 1
    assert contexts.stored == 2
    assert [contexts.sequence(job.result()) for job in jobs] == [*TARGETS, TARGETS[0]]


@pytest.mark.parametrize("make", [score_jobs, lambda turbo: [EmbedJob(TARGETS, 2)]])
def test_what_is_not_finite_is_an_error(turbo, contexts, make, monkeypatch):
    monkeypatch.setattr(
        "esm_turbo.serve.jobs.predict_together",
        lambda turbo, slices, budget: [torch.full((len(one.numbers),), torch.nan) for one in slices],
    )
    nan = [torch.full((4,), torch.nan)] * 2
    monkeypatch.setattr(
        "esm_turbo.serve.jobs.embed",
        lambda *_, **__: [type("E", (), {"mean_representations": {0: mean}})() for mean in nan],
    )
    with pytest.raises(Exception, match="not finite"):
        run(jobs := make(turbo), turbo, contexts, 10_000)
        jobs[0].result()
