"""Generation from records: batches, records that fail, and what is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from esm_turbo import TurboEsm
from esm_turbo.model.memory import NotEnoughMemoryError
from esm_turbo.model.plan import ForwardInputs
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.generation.options import GenerationOptions
from esm_turbo.tasks.generation.records import GeneratedSequence, generate_records

RECORDS = [
    ProteinRecord("a", "MKTAYIAKQRQISFVKSHFSRQ"),
    ProteinRecord("b", "MKT"),
    ProteinRecord("c", "GSGSWKDLAEXPLLKRRVWTCACDEF"),
]


def test_batches_do_not_matter(exact: TurboEsm) -> None:
    options = GenerationOptions(max_new_tokens=5, num_return_sequences=2)
    expected, bad = generate_records(exact, RECORDS, options, toks_per_batch=10_000)
    assert not bad
    calls: list[tuple[str, int, int]] = []
    generated, _ = generate_records(
        exact, RECORDS, options, toks_per_batch=1, progress=lambda *call: calls.append(call)
    )
    assert [one.sequence for one in generated] == [one.sequence for one in expected]
    assert [one.seed for one in generated] == [one.seed for one in expected]
    assert [(one.record, one.sample) for one in generated] == [(r, k) for r in "abc" for k in (1, 2)]
    assert calls == [("generate", n, 6) for n in range(7)]


def test_samples_are_rows_of_a_batch(exact: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many samples are asked for, no batch has more tokens than allowed, and none computes a context twice."""
    forwards: list[tuple[int, int]] = []
    original = exact.model.esm.executor.forward

    def noting(inputs: ForwardInputs, cache: Any) -> Any:
        forwards.append(tuple(inputs.ids.shape))
        return original(inputs, cache)

    monkeypatch.setattr(exact.model.esm.executor, "forward", noting)
    options = GenerationOptions(max_new_tokens=2, num_return_sequences=20)
    generated, bad = generate_records(exact, RECORDS[:1], options, toks_per_batch=60)
    assert (len(generated), bad) == (20, [])
    # A row has <cls>, 22 residues, two new ones and a mask.
    assert max(rows for rows, _ in forwards) == 2
    assert sum(tokens == 23 for _, tokens in forwards) == 10
    forwards.clear()
    options = GenerationOptions(positions=[3, 4], num_return_sequences=20)
    assert [one.sample for one in generate_records(exact, RECORDS[:1], options, toks_per_batch=60)[0]] == [
        *range(1, 21)
    ]
    assert max(rows for rows, _ in forwards) == 2


def test_a_record_that_does_not_fit_does_not_stop_the_others(exact: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator of the CPU raises a plain RuntimeError; a batch is halved until only the large record is left."""
    original = exact.model.esm.executor.forward

    def small(inputs: ForwardInputs, cache: Any) -> Any:
        if inputs.ids.shape[1] > 24:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
        return original(inputs, cache)

    monkeypatch.setattr(exact.model.esm.executor, "forward", small)
    generated, bad = generate_records(exact, RECORDS, GenerationOptions(positions=[2], num_return_sequences=2))
    assert [(one.record, one.sample) for one in generated] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    [(record, reason)] = [(one.record, one.reason) for one in bad]
    assert record == "c" and reason.startswith("its 26 residues need more memory than cpu has")


def test_an_identifier_names_one_protein(exact: TurboEsm) -> None:
    records = [ProteinRecord("a", "MKTAY"), ProteinRecord("a", "MKWAY")]
    with pytest.raises(ValueError, match="identifier 'a' names two sequences"):
        generate_records(exact, records, GenerationOptions(positions=[2]))


def test_positions_are_the_same_for_all_records(exact: TurboEsm) -> None:
    """Batches are sorted by length, and lists would go to other records."""
    for records, samples in ((RECORDS[:2], 1), (RECORDS[:1], 2)):
        options = GenerationOptions(positions=[[3], [2]], num_return_sequences=samples)
        with pytest.raises(ValueError, match="`positions` of records must be one list for all of them"):
            generate_records(exact, records, options)


@pytest.mark.parametrize("more", [{"num_return_sequences": 10**9}, {"max_new_tokens": 10**9}])
def test_what_cannot_fit_is_refused_before_it_begins(exact: TurboEsm, more: dict[str, int]) -> None:
    options = GenerationOptions(**({"max_new_tokens": 3} | more))
    with pytest.raises(ValueError, match="no residue may be generated at any position"):
        generate_records(exact, RECORDS, GenerationOptions(max_new_tokens=1, allowed="A", banned="A"))
    with pytest.raises(ValueError, match=r"log-probabilities need about [\d,.]+ GiB of memory, .* are free"):
        generate_records(exact, RECORDS, options)
    with pytest.raises(NotEnoughMemoryError, match=r"need about [\d,.]+ GiB of memory, .* are free on cpu"):
        exact.generate([one.sequence for one in RECORDS], **({"max_new_tokens": 3} | more))
    if "num_return_sequences" in more:
        with pytest.raises(NotEnoughMemoryError, match=r"need about [\d,.]+ GiB of memory, .* are free on cpu"):
            exact.generate(RECORDS[0].sequence, positions=[2], **more)


@pytest.mark.parametrize("toks_per_batch", [1, 10_000])
def test_a_bad_record_does_not_stop_the_others(exact: TurboEsm, toks_per_batch: int) -> None:
    """A record too short for a position is found even in a batch with good ones."""
    generated, bad = generate_records(
        exact, RECORDS, GenerationOptions(positions=[2, 5]), toks_per_batch=toks_per_batch
    )
    assert [one.record for one in generated] == ["a", "c"]
    assert [(one.record, one.reason) for one in bad] == [("b", "its positions are 1 to 3, got 5")]


@pytest.mark.parametrize("toks_per_batch", [1, 10_000])
def test_a_record_without_a_constrained_position_is_bad_in_any_batch(exact: TurboEsm, toks_per_batch: int) -> None:
    options = GenerationOptions(max_new_tokens=2, allowed={len(RECORDS[0].sequence) + 1: "W"}, num_return_sequences=2)
    generated, bad = generate_records(exact, RECORDS, options, toks_per_batch=toks_per_batch)
    assert [one.record for one in generated] == ["a", "a"]
    assert [one.record for one in bad] == ["b", "c"]
    assert {one.reason for one in bad} == {"`allowed` names position 23, where nothing is generated"}


def test_a_record_of_the_output_reproduces_its_sequence(exact: TurboEsm) -> None:
    options = GenerationOptions(max_new_tokens=4, num_return_sequences=2)
    for one in generate_records(exact, RECORDS, options, seed=3)[0]:
        given = next(record.sequence for record in RECORDS if record.id == one.record)
        assert exact.generate(given, max_new_tokens=4, seed=one.seed).sequences == [one.sequence]


def test_sequences_of_two_models_are_not_returned(exact: TurboEsm) -> None:
    turbo = copy.deepcopy(exact)

    def change(_: str, done: int, __: int) -> None:
        if done == 1:
            turbo.model.esm.encoder.layer[0].output.dense.bias.data.add_(1)

    with pytest.raises(ValueError, match="the model has changed since the run began"):
        generate_records(turbo, RECORDS, GenerationOptions(max_new_tokens=1), toks_per_batch=1, progress=change)


def test_the_header_of_an_entry() -> None:
    one = GeneratedSequence("a", 2, "MKTAG", [2, 3, 5], [-1.0, -2.0, -0.5], 7)
    assert one.fasta() == ">a_2 positions=2-3,5 new=KTG mean_log_prob=-1.1667 seed=7\nMKTAG\n"
