"""Calls that score one protein or many, candidates or variants: equal results, failures, and wrong arguments."""

from __future__ import annotations

import copy
import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from esm_turbo import ContextStore, EmbeddingRequest, TurboEsm, TurboEsmForMaskedLM, TurboKVCache, embed_records
from esm_turbo.assets import evaluation_proteins
from esm_turbo.config import DEFAULT_PRESET, TurboConfig
from esm_turbo.files import model_contents
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import LongProteinWarning
from esm_turbo.tasks.common import forwards, memory, row_engine
from esm_turbo.tasks.common.memory import NotEnoughMemoryError
from esm_turbo.tasks.embedding.embed import iter_embeddings
from esm_turbo.tasks.generation.options import GenerationOptions
from esm_turbo.tasks.generation.records import generate_records
from tests.helpers.scores import assert_close, assert_variants_close

MakeModel = Callable[..., TurboEsmForMaskedLM]
TARGETS = ["MKTAYIAKQRQISFVKSHFSRQLEERLG", "GSWKDLAEPL", "MK", "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSR"]
CANDIDATES = ["ACDEF", "WTC", "GGGSG", "A"]
OWN_CANDIDATES = [["ACDEF"], ["WTC", "ACDEF"], ["A"], ["GGGSG", "AC"]]
PROTEINS = ["MKTAYIAKQRQISFVK", "GSW", "M", "MKTAYIAKQRQISFVKSHFSRQLE"]
RECORDS = [ProteinRecord(f"p{number}", sequence) for number, sequence in enumerate(PROTEINS)]
VARIANTS = [["M1A", "K2R:T3S", "K16W"], ["G1A"], ["M1C"], ["E24D", "S13G", "K2K"]]


def dev_set(count: int) -> tuple[list[str], list[str]]:
    """The first different targets and peptides of peptide_targets_dev.csv."""
    with (evaluation_proteins().parent / "peptide_targets_dev.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    targets = dict.fromkeys(row["Receptor Sequence"] for row in rows)
    return list(targets)[:count], list(dict.fromkeys(row["Sequence"] for row in rows))[:count]


def _write(model: TurboEsmForMaskedLM) -> None:
    with torch.no_grad():
        model.esm.encoder.layer[0].output.dense.bias.add_(1)


def _train(model: TurboEsmForMaskedLM) -> None:
    """By an optimizer that counts no write."""
    parameter = model.esm.encoder.layer[0].output.dense.bias
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()


def _set(model: TurboEsmForMaskedLM) -> None:
    model.esm.encoder.layer[0].LayerNorm.eps = 0.1


def _set_in_head(model: TurboEsmForMaskedLM) -> None:
    model.lm_head.layer_norm.eps = 0.1


def _hook(model: TurboEsmForMaskedLM) -> None:
    model.esm.encoder.layer[0].register_forward_hook(lambda *_: None)


def _drop(model: TurboEsmForMaskedLM) -> None:
    model.esm.embeddings.dropout.p = 0.1
    model.train()


@pytest.mark.parametrize("change", [_write, _train, torch.nn.Module.bfloat16, _set, _set_in_head, _hook, _drop])
@pytest.mark.parametrize(
    "call",
    [
        lambda turbo, progress: turbo.score(TARGETS[0], CANDIDATES, arm="full", progress=progress),
        lambda turbo, progress: turbo.score_pairs(TARGETS, CANDIDATES, arm="full", progress=progress),
        lambda turbo, progress: turbo.score_variants(PROTEINS[0], VARIANTS[0], arm="full", progress=progress),
        lambda turbo, progress: turbo.score_many_variants(PROTEINS, VARIANTS, arm="full", progress=progress),
    ],
)
def test_no_call_mixes_results_of_two_models(
    turbo: TurboEsm, call: Callable[[TurboEsm, Any], object], change: Callable[[TurboEsmForMaskedLM], object]
) -> None:
    changing = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)

    def progress(*_: object) -> None:
        # As another thread might that trains the model.
        change(changing.model)

    with pytest.raises(ValueError, match="the model has changed during the call"):
        call(changing, progress)


def test_another_model_may_be_trained_during_a_call(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_contents, "_STEPS", {})
    other = torch.nn.Parameter(torch.ones(2))

    def progress(*_: object) -> None:
        other.grad = torch.ones_like(other)
        torch.optim.SGD([other], lr=1.0).step()

    assert turbo.score(TARGETS[0], CANDIDATES, arm="full", progress=progress).scores
    assert model_contents._STEPS


@pytest.mark.parametrize(
    "call",
    [
        lambda turbo: turbo.score(TARGETS[0], CANDIDATES, arm="full"),
        lambda turbo: turbo.score_variants(PROTEINS[0], VARIANTS[0], arm="full"),
        lambda turbo: turbo.embed(PROTEINS),
        lambda turbo: turbo.generate(PROTEINS[:1], max_new_tokens=1),
        lambda turbo: turbo.evaluate(PROTEINS[:1], ["exact"]),
    ],
)
def test_no_call_gives_random_numbers(turbo: TurboEsm, call: Callable[[TurboEsm], object]) -> None:
    training = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    _drop(training.model)
    with pytest.raises(ValueError, match=r"with dropout in .*: what it computes is random; call .eval\(\)"):
        call(training)


@pytest.mark.parametrize("change", [lambda cache: cache.crop(3), lambda cache: cache.reset()])
@pytest.mark.parametrize(
    "call",
    [
        lambda turbo, cache, told: turbo.score(cache, CANDIDATES, refresh=0, toks_per_batch=20, progress=told),
        lambda turbo, cache, told: turbo.score_variants(cache, VARIANTS[0], toks_per_batch=20, progress=told),
    ],
)
def test_a_cache_that_changes_during_a_call_is_read_as_it_was(
    turbo: TurboEsm, call: Callable[..., Any], change: Callable[[TurboKVCache], None]
) -> None:
    cache = turbo.prefill(PROTEINS[0])
    expected = call(turbo, cache, None).scores
    assert call(turbo, cache, lambda *_: change(cache)).scores == expected
    assert int(cache.lengths.sum()) < 4


@pytest.mark.parametrize(
    ("targets", "candidates", "options"),
    [
        (TARGETS, CANDIDATES, {"arm": "turbo", "place": "masked"}),
        (TARGETS, CANDIDATES, {"arm": "turbo", "place": "empty", "toks_per_batch": 30}),
        (TARGETS, CANDIDATES, {"arm": "frozen", "place": "masked", "toks_per_batch": 30}),
        (TARGETS, CANDIDATES, {"arm": "frozen", "place": "empty"}),
        (TARGETS[:2], CANDIDATES[:2], {"arm": "full"}),
        (TARGETS, OWN_CANDIDATES, {"refresh": 3}),
        (*dev_set(3), {"toks_per_batch": 2048}),
        # Many contexts of one batch, some of them equal.
        ([TARGETS[0][:length] for length in range(1, 25)] * 2, "ACD", {"place": "empty"}),
    ],
)
def test_pairs_are_scored_as_one_target_at_a_time(
    turbo: TurboEsm, targets: list[str], candidates: Any, options: dict[str, Any]
) -> None:
    found = turbo.score_pairs(targets, candidates, background="none", **options)
    assert found.failed == {} and len(found) == len(targets)
    lists = candidates if candidates is OWN_CANDIDATES else [candidates] * len(targets)
    options.pop("toks_per_batch", None)
    for one, target, own in zip(found.scores, targets, lists, strict=True):
        assert one is not None
        expected = turbo.score(target, own, **options)
        assert_close(one, expected)
        assert one.arm != "full" or one == expected


def test_results_of_pairs_as_a_table(turbo: TurboEsm) -> None:
    found = turbo.score_pairs((target for target in TARGETS), OWN_CANDIDATES)
    assert [row[:3] for row in found.rows()] == [
        (i, candidate, rank) for i in range(4) for candidate, rank, *_ in found[i].rows()
    ]
    assert [[one.candidate for one in found[i].scores] for i in range(4)] == OWN_CANDIDATES
    assert repr(found) == "PairScores(4 targets, 6 pairs, 0 failed)"


@pytest.mark.parametrize("variants", [VARIANTS, None])
@pytest.mark.parametrize(
    ("arm", "method", "tokens"),
    [("turbo", "masked", 4096), ("frozen", "masked", 4096), ("turbo", "wild_type", None), ("full", "masked", None)],
)
def test_variants_are_scored_as_one_protein_at_a_time(
    turbo: TurboEsm, arm: Any, method: Any, tokens: int | None, variants: list[list[str]] | None
) -> None:
    calls: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"arm": arm, "method": method, "refresh": 5}
    given = None if variants is None else (own for own in variants)
    found = turbo.score_many_variants(  # type: ignore[arg-type]
        PROTEINS, given, toks_per_batch=tokens, progress=lambda *call: calls.append(call), **options
    )
    for index, protein in enumerate(PROTEINS):
        own = None if variants is None else variants[index]
        assert_variants_close(found[index], turbo.score_variants(protein, own, **options))
    count = 19 * sum(map(len, PROTEINS)) if variants is None else 8
    assert repr(found) == f"ManyVariantScores(4 proteins, {count} variants, 0 failed)"
    assert sum(1 for _ in found.rows()) == count
    # Positions of all proteins.
    assert calls[-1] == ("score", *[44 if variants is None else 9] * 2)


@pytest.mark.parametrize("task", ["score", "variants"])
def test_rows_of_several_proteins_share_batches(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    indices: list[list[int]] = []
    original = row_engine.log_probabilities

    def watched(*arguments: object, **options: object) -> object:
        indices.append(list(options.get("context_index", ())))  # type: ignore[call-overload]
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(row_engine, "log_probabilities", watched)
    if task == "score":
        turbo.score_pairs(TARGETS, CANDIDATES[:3], toks_per_batch=4096)
    else:
        turbo.score_many_variants(PROTEINS, toks_per_batch=4096)
    [index] = indices
    # Of each target a context for two lengths.
    assert (len(index), len(set(index))) == ((4 * (5 + 3 + 5), 8) if task == "score" else (44, 4))


def test_proteins_that_fail_do_not_stop_the_others(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(model: object, tokens: int, **options: object) -> None:
        if tokens > 40:
            raise NotEnoughMemoryError(f"{tokens} tokens are too many")

    monkeypatch.setattr(forwards, "check_memory", small)
    pairs = turbo.score_pairs(["M1K", *TARGETS, "", "MK-"], ["ACDEF", "WTC"], background="none")
    own = [["M1A"]] * 5 + [["K1A"]]
    many = turbo.score_many_variants(["M1K", TARGETS[0], "MK", "MKT", TARGETS[3] + "GG", "MK"], own)
    monkeypatch.undo()
    assert {i: reason.partition(" ")[0] for i, reason in pairs.failed.items()} == {
        0: "the", 4: "44", 5: "the", 6: "the"
    }  # fmt: skip
    assert {i: reason.partition(" ")[0] for i, reason in many.failed.items()} == {0: "the", 4: "43", 5: "'K1A':"}
    assert [i for i, one in enumerate(pairs.scores) if one is None] == [0, 4, 5, 6]
    assert_close(pairs[2], turbo.score(TARGETS[1], ["ACDEF", "WTC"]))
    assert_variants_close(many[1], turbo.score_variants(TARGETS[0], ["M1A"]))
    with pytest.raises(ValueError, match="target 4 was not scored: 44 tokens are too many"):
        pairs[4]
    with pytest.raises(ValueError, match="protein -1 was not scored: 'K1A'"):
        many[-1]


@pytest.mark.parametrize("arm", ["full", "frozen", "turbo"])
def test_a_lack_of_memory_names_both_sizes(turbo: TurboEsm, monkeypatch: pytest.MonkeyPatch, arm: Any) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**18)
    message = r"\d+ tokens at once need about \d+ MiB .* 0 MiB are free on cpu"
    with pytest.raises(NotEnoughMemoryError, match=message):
        turbo.score(TARGETS[0], "ACD", arm=arm)
    with pytest.raises(NotEnoughMemoryError, match=message):
        turbo.score_variants(TARGETS[0], "M1A", arm=arm)


def test_long_proteins_warn_once(turbo: TurboEsm) -> None:
    long = "ACDEFGHIKL" * 103
    calls: list[Any] = [
        lambda: turbo.score(long, "AC"),
        lambda: turbo.score_pairs([long], "A"),
        lambda: turbo.score_variants(long, "A1C"),
        lambda: turbo.score_many_variants([long], [["A1C"]]),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [one.category for one in caught] == [LongProteinWarning]
        assert (caught[0].filename, caught[0].lineno) == (__file__, call.__code__.co_firstlineno)


NO_COUNT = "`refresh` must be an integer of at least 0, got"
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"arm": "fast"}, r"`arm` must be one of \['full', 'frozen', 'turbo'\], got 'fast'"),
    ({"refresh": -1}, f"{NO_COUNT} -1"),
    ({"refresh": 1.5}, f"{NO_COUNT} 1.5"),
    ({"toks_per_batch": 0}, "`toks_per_batch` must be an integer of at least 1, got 0"),
    ({"store": 5}, "`store` must be a ContextStore, got a int$"),
    ({"store": "folder"}, r"`store` must be a ContextStore, got a str; .*ContextStore\('folder'\)"),
]


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        *(("score", options, message) for options, message in OPTIONS),
        ("score", {"place": "alone"}, r"`place` must be one of \['masked', 'empty'\], got 'alone'"),
        ("score", {"unknown_residues": "x"}, "`unknown_residues` must be one of"),
        ("score", {"rescore": -1}, "`rescore` must be an integer of at least 0, got -1"),
        ("score", {"rescore": 1, "arm": "full"}, "give one of the two"),
        ("score", {"sort_by": "specificity"}, "`sort_by` 'specificity' needs a `background`"),
        ("score", {"first": ""}, "the target: holds no residues"),
        ("score", {"first": "MK1T"}, "the target: position 3 is '1'"),
        ("score", {"second": []}, "`candidates` must hold at least one"),
        ("score", {"second": ["ACD", ""]}, "candidate 2: holds no residues"),
        ("score", {"second": ["ACD", "AC-D"]}, "candidate 2: position 3 is '-'"),
        ("score", {"second": ["AC<mask>D"]}, "candidate 1: holds a <mask>"),
        ("score", {"second": [" ACD\n", "ACD EFG"]}, "candidate 2: has a space inside"),
        ("score", {"second": ["AC", "XB"]}, "candidate 2: 'XB' holds none but unknown residues"),
        ("score_pairs", {"first": []}, "`targets` must hold at least one target"),
        ("score_pairs", {"second": []}, "`candidates` must hold at least one candidate"),
        ("score_pairs", {"second": [["A"], ["C"]]}, r"one list of them per target \(1\), got 2 lists"),
        ("score_pairs", {"first": ["MK"] * 2, "second": [["A"], []]}, "of each target, target 1 has none"),
        ("score_pairs", {"second": ["A", "A1"]}, "candidate 2 of target 0: position 2 is '1'"),
        ("score_pairs", {"refresh": -1}, NO_COUNT),
        ("score_pairs", {"place": "full"}, "`place` must be one of"),
        *(("score_variants", options, message) for options, message in OPTIONS),
        ("score_variants", {"method": "both"}, r"\['masked', 'wild_type', 'pseudo_perplexity'\], got 'both'"),
        ("score_variants", {"first": ""}, "the wild type: holds no residues"),
        ("score_variants", {"first": "MK-T"}, "the wild type: position 3 is '-'"),
        ("score_variants", {"first": "MK<mask>T"}, "the wild type holds a <mask>"),
        ("score_variants", {"second": []}, "`variants` must hold at least one"),
        ("score_variants", {"second": ["M1A", "K1A"]}, "'K1A': residue 1 is M"),
        ("score_many_variants", {"first": []}, "must hold at least one"),
        ("score_many_variants", {"second": [["M1A"]] * 2}, r"one list per protein \(1\), got 2"),
        ("score_many_variants", {"second": "M1A"}, r"one list per protein \(1\), got 'M1A'"),
        ("score_many_variants", {"store": "folder"}, "`store` must be a ContextStore, got a str"),
        ("score_many_variants", {"method": "both"}, "`method` must be one of"),
    ],
)
def test_wrong_arguments(turbo: TurboEsm, call: str, options: dict[str, Any], message: str) -> None:
    firsts = {"score": "MK", "score_variants": "MK"}
    seconds = {"score": ["A"], "score_pairs": ["A"], "score_variants": ["M1A"], "score_many_variants": [["M1A"]]}
    options = {"first": firsts.get(call, ["MK"]), "second": seconds[call]} | options
    with pytest.raises(ValueError, match=message):
        getattr(turbo, call)(options.pop("first"), options.pop("second"), **options)


def test_what_is_no_sequence(turbo: TurboEsm) -> None:
    calls: list[tuple[Any, list[Any], str]] = [
        (turbo.score, [7, ["A"]], "target 1: a target must be a string, got int"),
        (turbo.score_pairs, [["MK", None], ["A"]], "target 2: a target must be a string, got NoneType"),
        (turbo.score_pairs, [["MK"], [[7]]], "candidate 1: a candidate must be a string, got int"),
        (turbo.score_many_variants, [[None]], "wild type 1: a wild type must be a string, got NoneType"),
        (turbo.score_many_variants, [["MKT"], [["M1A", 2]]], "variant 2: a variant must be a string, got int"),
    ]
    for call, arguments, message in calls:
        with pytest.raises(TypeError, match=message):
            call(*arguments)


def test_a_store_of_another_model_is_refused(turbo: TurboEsm, tmp_path: Any, tiny_model: MakeModel) -> None:
    store = ContextStore(tmp_path / "store")
    store.add(TurboEsm(tiny_model(preset=DEFAULT_PRESET), turbo.tokenizer), ["MKTAY"])
    for call in (lambda: turbo.score_pairs(TARGETS, CANDIDATES, store=store),
                 lambda: turbo.score_many_variants(TARGETS, store=store)):  # fmt: skip
        with pytest.raises(ValueError, match="holds contexts of a model without a name, for 2 layers"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda turbo, _, told: turbo.score(TARGETS[0], CANDIDATES, background="alone", progress=told),
        lambda turbo, _, told: turbo.score_pairs(TARGETS, CANDIDATES, rescore=1, progress=told),
        lambda turbo, _, told: turbo.score_many_variants(PROTEINS[:2], progress=told),
        lambda turbo, folder, told: ContextStore(folder).add(turbo, TARGETS, progress=told),
        lambda turbo, folder, told: embed_records(
            turbo, RECORDS, folder / "out", EmbeddingRequest.of(turbo, [-1], ["mean"]), progress=told
        ),
        lambda turbo, _, told: generate_records(turbo, RECORDS, GenerationOptions(max_new_tokens=2), progress=told),
    ],
    ids=["score", "score_pairs", "variants", "store", "embed", "generate"],
)
def test_a_call_has_one_preset_and_one_calibration(
    turbo: TurboEsm, tmp_path: Path, call: Callable[..., object]
) -> None:
    own = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    refused: list[str] = []

    def change(*_: object) -> None:
        with pytest.raises(RuntimeError, match="a call with this model has not ended") as error:
            own.model.set_turbo(calibration=own.calibration, preset="turbo1")
        refused.append(str(error.value))

    call(own, tmp_path, change)
    assert len(refused) > 1
    own.model.set_turbo(calibration=own.calibration, preset="turbo1")
    assert own.score(TARGETS[0], CANDIDATES).preset == "turbo1"


def test_what_changes_a_model_between_batches_is_refused(turbo: TurboEsm) -> None:
    own = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    batches = iter_embeddings(own, PROTEINS, EmbeddingRequest.of(own, [-1], ["mean"]), toks_per_batch=8)
    next(batches)
    own.model.esm.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="changed during the call"):
        next(batches)


def test_a_call_ends_with_what_it_yields(turbo: TurboEsm) -> None:
    own = TurboEsm(copy.deepcopy(turbo.model), turbo.tokenizer)
    batches = iter_embeddings(own, PROTEINS, EmbeddingRequest.of(own, [-1], ["mean"]), toks_per_batch=8)
    next(batches)
    with pytest.raises(RuntimeError, match="has not ended"):
        own.model.set_turbo(calibration=None, preset="exact")
    with pytest.raises(RuntimeError, match="has not ended"):
        own.model.esm.turbo_config = TurboConfig.from_preset("exact")
    # A copy is in no call.
    copy.deepcopy(own.model).set_turbo(calibration=None, preset="exact")
    del batches
    own.model.set_turbo(calibration=None, preset="exact")
