"""The evaluation, against slow computations of its figures one token at a time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from esm_turbo import Calibration, TurboConfig, TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import calibration_proteins
from esm_turbo.config import PRESETS
from esm_turbo.evaluate import PAPER_ABLATION, PAPER_TABLE_7, Accuracy, Evaluation, TokenAccuracy, planted, protocols
from esm_turbo.evaluate.memory import measure_memory
from esm_turbo.proteins.fasta import FastaError, ProteinRecord, read_fasta_strict

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMWDELKNPVYACCTI", "FVNQHLCGSHLVEALYLVCGERGFFYTPKT", "MA"]
CLASSES = ["mainly_alpha", "mainly_beta", "mainly_alpha", None]
OFF: dict[str, Any] = {"extend_ks": (), "outlier_scales": ()}


@pytest.fixture(scope="module")
def tiny(turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> TurboEsm:
    """A small model of random weights with its calibration."""
    return TurboEsm(tiny_model(preset="paper"), turbo.tokenizer)


@pytest.fixture(scope="module")
def evaluation(tiny: TurboEsm) -> Evaluation:
    """Everything but outliers."""
    return tiny.evaluate(SEQUENCES, ["exact", "paper"], classes=CLASSES, extend_ks=(1, 18), outlier_scales=())


def ids_of(turbo: TurboEsm, sequence: str) -> Tensor:
    return torch.tensor([[turbo.codes.cls, *turbo.codes.encode(sequence, "it"), turbo.codes.eos]])


@torch.no_grad()
def cache_of(turbo: TurboEsm, ids: Tensor, preset: str) -> Any:
    """What a forward with `use_cache=True` stores, whatever the model's own preset."""
    esm = turbo.model.esm
    own, esm.turbo_config = esm.turbo_config, TurboConfig.from_preset(preset)
    try:
        return turbo.model(ids, use_cache=True).past_key_values
    finally:
        esm.turbo_config = own


def check(accuracy: Accuracy, reference: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    """Compares figures with those of lists of (hidden state, logits) of single tokens, in PyTorch."""
    hidden, logits = (torch.stack(x).double() for x in zip(*reference, strict=True))
    other_hidden, other_logits = (torch.stack(x).double() for x in zip(*other, strict=True))
    cosine = F.cosine_similarity(hidden, other_hidden, dim=-1)
    kl = F.kl_div(other_logits.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    expected = {
        "tokens": len(hidden),
        "cosine_mean": cosine.mean(),
        "cosine_q01": cosine.quantile(0.01),
        "cosine_min": cosine.min(),
        "kl_mean": kl.mean(),
        "kl_q99": kl.quantile(0.99),
        "top1_agreement": (logits.argmax(-1) == other_logits.argmax(-1)).double().mean(),
        "relative_rms_error": (other_hidden - hidden).norm() / hidden.norm(),
    }
    # float32 forwards of other shapes, so their sums are rounded otherwise.
    for name, value in expected.items():
        assert getattr(accuracy, name) == pytest.approx(float(value), rel=1e-4, abs=2e-6), name


@torch.no_grad()
def test_leave_one_out_equals_one_extension_per_token(tiny: TurboEsm, evaluation: Evaluation) -> None:
    arms: dict[str, dict[bool, list[tuple[Tensor, Tensor]]]] = {
        arm: {True: [], False: []} for arm in ("full", "exact", "paper")
    }
    for sequence in SEQUENCES:
        ids = ids_of(tiny, sequence)
        n = ids.shape[1]
        full = tiny.model(ids, output_hidden_states=True)
        caches = {preset: cache_of(tiny, ids, preset) for preset in ("exact", "paper")}
        for i in range(n):
            special = i in (0, n - 1)
            arms["full"][special].append((full.hidden_states[-1][0, i], full.logits[0, i]))
            mask = torch.ones(1, n + 1, dtype=torch.int64)
            mask[0, i] = 0
            for preset, cache in caches.items():
                out = tiny.model(
                    ids[:, i : i + 1],
                    mask,
                    torch.tensor([[i]]),
                    past_key_values=cache,
                    output_hidden_states=True,
                )
                arms[preset][special].append((out.hidden_states[-1][0, 0], out.logits[0, 0]))
    loo = evaluation["paper"].leave_one_out
    for special in (False, True):
        name = "special_tokens" if special else "residues"
        check(getattr(loo.against_frozen, name), arms["exact"][special], arms["paper"][special])
        check(getattr(loo.against_full, name), arms["full"][special], arms["paper"][special])
        check(getattr(evaluation.frozen.leave_one_out, name), arms["full"][special], arms["exact"][special])


def test_leave_one_out_does_not_depend_on_the_chunks(
    tiny: TurboEsm, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "_ROWS", 5)
    chunked = tiny.evaluate(SEQUENCES, ["paper"], **OFF)["paper"].leave_one_out
    whole = evaluation["paper"].leave_one_out
    assert dataclasses.asdict(chunked.against_frozen) == _approx(whole.against_frozen)


def _approx(accuracy: TokenAccuracy) -> dict[str, Any]:
    figures = dataclasses.asdict(accuracy)
    return {part: pytest.approx(values, rel=1e-3, abs=1e-6) for part, values in figures.items()}


def test_frozen_equals_full_under_leave_one_out(evaluation: Evaluation) -> None:
    for accuracy in (evaluation.frozen.leave_one_out.residues, evaluation.frozen.leave_one_out.special_tokens):
        assert accuracy.relative_rms_error < 1e-5
        assert accuracy.kl_q99 < 1e-9
        assert accuracy.top1_agreement == 1.0


def test_full_precision_has_no_quantisation_error_and_the_paper_has(evaluation: Evaluation) -> None:
    exact, paper = evaluation["exact"], evaluation["paper"]
    assert exact.leave_one_out.against_frozen.residues.relative_rms_error == 0.0
    assert exact.leave_one_out.against_frozen.residues.kl_mean == 0.0
    assert exact.leave_one_out.against_full == evaluation.frozen.leave_one_out
    assert paper.leave_one_out.against_frozen.residues.relative_rms_error > 1e-3
    assert paper.leave_one_out.against_frozen.residues.kl_mean > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("w", [0, 8, 32])
@pytest.mark.parametrize("k", [1, 18])
def test_extension_equals_one_protein_at_a_time(tiny: TurboEsm, evaluation: Evaluation, k: int, w: int) -> None:
    arms: dict[str, dict[bool, list[tuple[Tensor, Tensor]]]] = {
        arm: {True: [], False: []} for arm in ("full", "exact", "paper")
    }
    for sequence in SEQUENCES:
        if len(sequence) <= k:
            continue
        ids = ids_of(tiny, sequence)
        full = tiny.model(ids, output_hidden_states=True)
        outputs = {"full": (full.hidden_states[-1][0, -k - 1 :], full.logits[0, -k - 1 :])}
        for preset in ("exact", "paper"):
            extended = tiny.extend(cache_of(tiny, ids[:, : -k - 1], preset), sequence[-k:], refresh=w)
            outputs[preset] = (extended.hidden_states[0], extended.logits[0])
        for arm, (hidden, logits) in outputs.items():
            for i in range(k + 1):
                arms[arm][i == k].append((hidden[i], logits[i]))
    [frozen] = [f for f in evaluation.frozen.extend if (f.new_residues, f.refreshed) == (k, w)]
    [extend] = [e for e in evaluation["paper"].extend if (e.new_residues, e.refreshed) == (k, w)]
    assert frozen.against_full and extend.against_frozen and extend.against_full
    for special in (False, True):
        name = "special_tokens" if special else "residues"
        check(getattr(frozen.against_full, name), arms["full"][special], arms["exact"][special])
        check(getattr(extend.against_frozen, name), arms["exact"][special], arms["paper"][special])
        check(getattr(extend.against_full, name), arms["full"][special], arms["paper"][special])


def test_refreshing_everything_leaves_only_the_first_token_stored(evaluation: Evaluation) -> None:
    errors = {
        f.refreshed: f.against_full.residues.relative_rms_error
        for f in evaluation.frozen.extend
        if f.new_residues == 1 and f.against_full
    }
    # Beyond the context's length all residues run again; what stays frozen is `<cls>`.
    assert errors[32] < errors[8] < errors[0]


def test_a_number_given_twice_is_measured_once(tiny: TurboEsm, evaluation: Evaluation) -> None:
    result = tiny.evaluate(SEQUENCES, ["paper"], extend_ks=(1, 1), refresh_ws=(0, 0), outlier_scales=())
    [extend] = result["paper"].extend
    assert extend.against_frozen and extend.against_frozen.residues.tokens == len(SEQUENCES)


def test_proteins_too_short_are_skipped_and_counted(tiny: TurboEsm, evaluation: Evaluation) -> None:
    counts = {e.new_residues: (e.proteins, e.skipped) for e in evaluation["paper"].extend}
    assert counts == {1: (4, 0), 18: (2, 2)}
    nothing = tiny.evaluate(["MA", "MKT"], ["paper"], extend_ks=(3,), refresh_ws=(0,), outlier_scales=())
    [extend] = nothing["paper"].extend
    assert (extend.proteins, extend.skipped) == (0, 2)
    assert extend.against_frozen is extend.against_full is nothing.frozen.extend[0].against_full is None
    assert nothing.to_dict()["presets"][0]["extend"][0]["against_frozen"] is None
    assert "k = 3, 0 proteins (2 too short)" in nothing.table()


def test_memory_is_that_of_a_real_cache(tiny: TurboEsm, evaluation: Evaluation) -> None:
    residues = ("".join(SEQUENCES) * 30)[:1022]
    geometry = tiny.model.esm.codec(TurboConfig.from_preset("exact")).geometry
    elements = 1024 * geometry.elements_per_token
    for preset in ("exact", "paper"):
        memory = evaluation[preset].memory
        cache = cache_of(tiny, ids_of(tiny, residues), preset)
        assert cache.get_seq_length() == memory.tokens == 1024
        assert memory.nbytes == cache.nbytes
        assert memory.bits_per_element == cache.bits_per_element == 8 * memory.nbytes / elements
        assert memory.ratio_to_fp32 == pytest.approx(32 / memory.bits_per_element)
        assert memory.ratio_to_fp16 == pytest.approx(16 / memory.bits_per_element)
    # Three bits and a sign an element, one byte a token for its id, eight for the length.
    assert evaluation["paper"].memory.nbytes == elements // 2 + 1024 + 8
    state = tiny.model.esm.codec(PRESETS["paper"]).state
    assert evaluation["paper"].memory.calibration_nbytes == sum(4 * tensor.numel() for tensor in state.values()) > 0
    assert evaluation["exact"].memory.calibration_nbytes == 0


def test_memory_of_other_lengths(tiny: TurboEsm) -> None:
    protein = protocols.Protein(0, "it", SEQUENCES[0])
    short, long = (measure_memory(tiny, [protein], [PRESETS["paper"]], tokens)[0] for tokens in (64, 128))
    assert (short.tokens, long.tokens) == (64, 128)
    assert long.nbytes - 8 == 2 * (short.nbytes - 8)


def test_groups_share_out_the_residues(tiny: TurboEsm, evaluation: Evaluation) -> None:
    loo = evaluation["paper"].leave_one_out
    total = sum(map(len, SEQUENCES))
    assert {name: group.tokens for name, group in loo.by_class.items()} == {
        "mainly_alpha": len(SEQUENCES[0]) + len(SEQUENCES[2]),
        "mainly_beta": len(SEQUENCES[1]),
    }
    assert {name: group.tokens for name, group in loo.by_length.items()} == {"1-100": total}
    assert {name: group.tokens for name, group in loo.by_position.items()} == {"1-300": total}
    alone = tiny.evaluate(SEQUENCES[1], ["paper"], **OFF)["paper"].leave_one_out
    assert dataclasses.asdict(alone.against_frozen.residues) == pytest.approx(
        dataclasses.asdict(loo.by_class["mainly_beta"]), rel=1e-6
    )
    assert alone.by_class == {}


def test_long_proteins_are_given_by_position_and_length(tiny: TurboEsm) -> None:
    sequences = [("".join(SEQUENCES) * 10)[:n] for n in (640, 120)]
    loo = tiny.evaluate(sequences, ["paper"], **OFF)["paper"].leave_one_out
    assert {name: group.tokens for name, group in loo.by_position.items()} == {
        "1-300": 420,
        "301-600": 300,
        "over 600": 40,
    }
    assert list(loo.by_position) == ["1-300", "301-600", "over 600"]
    assert [group.tokens for group in loo.by_length.values()] == [120, 640]


def test_layers_end_with_the_final_hidden_states(evaluation: Evaluation) -> None:
    loo = evaluation["paper"].leave_one_out
    assert [layer.layer for layer in loo.by_layer] == [1, 2]
    assert loo.by_layer[-1].cosine_mean == pytest.approx(loo.against_frozen.residues.cosine_mean, abs=1e-9)
    assert loo.by_layer[-1].relative_rms_error == pytest.approx(loo.against_frozen.residues.relative_rms_error)
    assert loo.by_layer[0] != loo.by_layer[1]


@pytest.fixture(scope="module")
def with_outliers(tiny: TurboEsm) -> Evaluation:
    return tiny.evaluate(
        SEQUENCES,
        ["exact", "paper"],
        extend_ks=(),
        outlier_scales=(1, 200),
        outlier_proteins=2,
        outlier_calibration_proteins=3,
    )


def test_outliers_leave_the_model_and_hurt_the_paper(with_outliers: Evaluation) -> None:
    setup = with_outliers.outliers
    assert setup is not None
    assert (setup.proteins, setup.calibration_proteins) == (2, 3)
    assert [model.scale for model in setup.models] == [1, 200]
    assert setup.models[0].drift.residues.relative_rms_error == 0.0
    assert 0.0 < setup.models[1].drift.residues.relative_rms_error < 1e-5
    assert with_outliers["exact"].outliers == ()
    mild, wild = with_outliers["paper"].outliers
    assert (mild.scale, wild.scale) == (1, 200)
    assert mild.against_frozen.residues.tokens == len(SEQUENCES[0]) + len(SEQUENCES[1])
    assert wild.against_frozen.residues.relative_rms_error > 1.5 * mild.against_frozen.residues.relative_rms_error


def test_outliers_are_calibrated_alike_at_every_scale(tiny: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = planted.calibrate_records, []

    def watched(turbo: TurboEsm, records: list[ProteinRecord], **options: Any) -> Calibration:
        calls.append([record.id for record in records])
        assert turbo.model is not tiny.model
        return honest(turbo, records, **options)

    monkeypatch.setattr(planted, "calibrate_records", watched)
    tiny.evaluate(
        SEQUENCES, ["paper"], extend_ks=(), outlier_scales=(1, 10), outlier_proteins=1, outlier_calibration_proteins=3
    )
    first = [record.id for record in read_fasta_strict(calibration_proteins())[:3]]
    assert calls == [first, first]


def test_outliers_and_extension_can_be_switched_off(tiny: TurboEsm) -> None:
    result = tiny.evaluate(SEQUENCES[:1], ["paper"], **OFF)
    assert result.outliers is None
    assert result["paper"].outliers == result["paper"].extend == result.frozen.extend == ()
    assert "Outliers" not in result.table()
    assert "Extension" not in result.table()


def test_json_is_plain_and_says_where_it_comes_from(evaluation: Evaluation, tiny: TurboEsm) -> None:
    text = evaluation.to_json()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON")) == evaluation.to_dict()
    about = evaluation.to_dict()["provenance"]
    assert about["proteins"] == 4
    assert about["residues"] == sum(map(len, SEQUENCES))
    assert about["dtype"] == "float32"
    assert about["device"] == "cpu"
    assert about["backend"] == "torch_ops"
    assert about["geometry"] == {"num_layers": 2, "num_heads": 4, "head_dim": 16}
    assert about["versions"]["torch"] == torch.__version__
    assert about["calibration"] == json.loads(json.dumps(tiny.calibration.provenance))
    assert len(about["sequences_sha256"]) == 64
    [exact, paper] = evaluation.to_dict()["presets"]
    assert (exact["name"], paper["name"]) == ("exact", "paper")
    assert TurboConfig.from_dict(paper["options"]) == PRESETS["paper"]
    assert paper["leave_one_out"]["against_frozen"]["residues"]["tokens"] == about["residues"]


def test_the_order_of_presets_is_kept_and_others_are_unknown(evaluation: Evaluation) -> None:
    assert [preset.name for preset in evaluation.presets] == ["exact", "paper"]
    with pytest.raises(KeyError, match="'turbo9' was not evaluated"):
        evaluation["turbo9"]


def test_presets_by_name_by_options_and_by_default(tiny: TurboEsm) -> None:
    def names(presets: Any) -> list[str]:
        return [preset.name for preset in tiny.evaluate("MKTAYIAK", presets, **OFF).presets]

    assert names(None) == ["exact", "paper"]
    assert names(["paper", PRESETS["paper"], "exact"]) == ["paper", "exact"]
    assert names("exact") == ["exact"]
    assert names([TurboConfig(bits=2)])[0].startswith("custom-")
    assert names({"mine": TurboConfig(bits=2), "theirs": "paper"}) == ["mine", "theirs"]
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="`presets` must name at least one"):
            names(nothing)
    with pytest.raises(ValueError, match="`preset` must be one of"):
        names(["turbo99"])


def test_the_model_is_left_as_it_was(tiny: TurboEsm, with_outliers: Evaluation) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    config, calibration = tiny.model.esm.turbo_config, tiny.calibration
    tiny.evaluate(SEQUENCES[:1], ["exact"], extend_ks=(1,), outlier_scales=(10,), outlier_proteins=1)
    assert tiny.model.esm.turbo_config is config
    assert tiny.calibration is calibration
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.model.state_dict().items())


def test_without_a_calibration_only_full_precision_can_be_evaluated(
    turbo: TurboEsm, tiny_model: Callable[..., TurboEsmForMaskedLM]
) -> None:
    bare = TurboEsm(tiny_model(preset="exact"), turbo.tokenizer)
    with pytest.raises(ValueError, match="needs a calibration of this model: make one with `esm-turbo calibrate"):
        bare.evaluate(SEQUENCES, ["exact", "paper"])
    result = bare.evaluate(SEQUENCES, extend_ks=(1,))
    assert [preset.name for preset in result.presets] == ["exact"]
    assert result.outliers is None
    assert result.provenance.calibration is None


def test_max_proteins_takes_the_first(tiny: TurboEsm) -> None:
    result = tiny.evaluate(SEQUENCES, ["exact"], 2, names=["a", "b", "c", "d"], classes=CLASSES, **OFF)
    assert result.provenance.proteins == 2
    assert result.provenance.residues == len(SEQUENCES[0]) + len(SEQUENCES[1])


def test_input_is_normalised_and_bad_records_are_named(tiny: TurboEsm, evaluation: Evaluation) -> None:
    lower = tiny.evaluate([s.lower() + "*" for s in SEQUENCES], ["exact"], **OFF)
    assert lower.provenance.sequences_sha256 == evaluation.provenance.sequences_sha256
    for bad, reason in (("MKJA", "position 3"), ("MK<mask>A", "position 3"), ("", "holds no residues")):
        with pytest.raises(ValueError, match=f"Q9.*{reason}") as caught:
            tiny.evaluate(["MKTA", bad], ["exact"], names=["P1", "Q9"], **OFF)
        assert not isinstance(caught.value, FastaError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_proteins": 0}, "`max_proteins` must be at least 1"),
        ({"extend_ks": (1, 0)}, "`extend_ks` must be at least 1 each"),
        ({"refresh_ws": (-1,)}, "`refresh_ws` must be at least 0 each"),
        ({"outlier_scales": (1, 0)}, "`outlier_scales` must be positive"),
        ({"outlier_scales": (float("nan"),)}, "`outlier_scales` must be positive"),
        ({"outlier_proteins": 0}, "`outlier_proteins` and"),
        ({"outlier_calibration_proteins": 0}, "`outlier_proteins` and"),
        ({"names": ["only one"]}, "`names` must be one per sequence, got 1 for 4"),
        ({"classes": ["x"] * 5}, "`classes` must be one per sequence, got 5 for 4"),
    ],
)
def test_bad_options_are_refused(tiny: TurboEsm, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.evaluate(SEQUENCES, ["exact"], **options)


def test_no_sequences_are_refused(tiny: TurboEsm) -> None:
    with pytest.raises(ValueError, match="`sequences` must hold at least one"):
        tiny.evaluate([], ["exact"])


def test_outputs_that_are_not_finite_name_preset_and_protein(tiny: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = protocols.extend_each_token

    def broken(model: Any, cache: Any, input_ids: Tensor) -> Any:
        outputs = honest(model, cache, input_ids)
        if cache.config.codec != "exact" and len(input_ids) == len(SEQUENCES[1]) + 2:
            outputs.hidden[2, 0] = np.nan
        return outputs

    monkeypatch.setattr(protocols, "extend_each_token", broken)
    with pytest.raises(ValueError, match="leave-one-out, paper against frozen, sequence 2: the output holds NaN"):
        tiny.evaluate(SEQUENCES, ["paper"], **OFF)


def test_progress_ends_every_stage(tiny: TurboEsm) -> None:
    seen: list[tuple[str, int, int]] = []
    tiny.evaluate(
        SEQUENCES,
        ["paper"],
        extend_ks=(1,),
        outlier_scales=(1, 10),
        outlier_proteins=2,
        outlier_calibration_proteins=2,
        progress=lambda *report: seen.append(report),
    )
    stages = {stage: [(done, total) for name, done, total in seen if name == stage] for stage, _, _ in seen}
    assert list(stages) == ["leave-one-out", "extend", "outliers"]
    for reports, total in zip(stages.values(), (4, 4, 4), strict=True):
        assert reports[0] == (0, total)
        assert reports[-1] == (total, total)
        assert reports == sorted(reports)


def test_table_shows_the_three_arms_with_their_figures(evaluation: Evaluation) -> None:
    text = evaluation.table()
    for arm in ("frozen - full", "paper - frozen", "paper - full"):
        assert text.count(arm) == 3, arm  # once under leave-one-out, once for each k
    accuracy = evaluation["paper"].leave_one_out.against_frozen
    [row] = [line for line in text.splitlines() if line.strip().startswith("paper - frozen") and line.count("(") == 0]
    memory = evaluation["paper"].memory
    assert row.split()[3:5] == [f"{memory.bits_per_element:.2f}", f"{memory.ratio_to_fp16:.2f}"]
    assert row.split()[5:8] == [
        f"{accuracy.residues.cosine_mean:.5f}",
        f"{accuracy.residues.cosine_q01:.4f}",
        f"{accuracy.residues.cosine_min:.4f}",
    ]
    assert row.split()[-1] == f"{accuracy.special_tokens.cosine_mean:.5f}"
    [row] = [line for line in text.splitlines() if line.strip().startswith("paper  ") and line.count(".") == 3]
    assert row.split()[1] == f"{memory.bits_per_element:.3f}"
    errors = [layer.relative_rms_error for layer in evaluation["paper"].leave_one_out.by_layer]
    [row] = [line for line in text.splitlines() if line.strip().startswith("paper  ") and line.count(".") == 2]
    assert row.split()[1:] == [f"{error:.4f}" for error in errors]
    assert "mainly_alpha" in text


@pytest.mark.parametrize("width", [None, 120, 60, 20])
def test_no_figure_is_cut_however_narrow_the_table(evaluation: Evaluation, width: int | None) -> None:
    text = evaluation.table(width)
    assert "…" not in text
    assert set(evaluation.table().split()) - set(text.split()) <= {"─" * n for n in range(200)}


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    assert list(PAPER_ABLATION)[:5] == list(PAPER_TABLE_7)
    changes = {
        name: {key for key, value in config.to_dict().items() if value != PRESETS["paper"].to_dict()[key]}
        for name, config in PAPER_ABLATION.items()
    }
    assert changes == {
        "full": set(),
        "no sign": {"sign_correction"},
        "shared LUT": {"shared_codebook"},
        "no rotation": {"key_transform"},
        "no rotation, no sign": {"key_transform", "sign_correction"},
        "random Hadamard": {"key_transform"},
        "standardised": {"standardize"},
        "signs on keys only": {"sign_correction"},
        "protected tokens": {"protect_special_tokens"},
        "16 levels, no sign": {"bits", "sign_correction"},
        "4 levels": {"bits"},
    }


def test_the_ablation_runs_under_its_own_names(tiny: TurboEsm) -> None:
    result = tiny.evaluate(SEQUENCES[:1], PAPER_ABLATION, **OFF)
    assert [preset.name for preset in result.presets] == list(PAPER_ABLATION)
    bits = {name: result[name].memory.bits_per_element for name in PAPER_ABLATION}
    # One more byte a token for its id, over 256 components, and the row's length.
    assert bits["full"] == pytest.approx(4, abs=0.04)
    assert bits["no sign"] == bits["no rotation, no sign"] == pytest.approx(3, abs=0.04)
    assert bits["16 levels, no sign"] == bits["full"]
    assert bits["4 levels"] == bits["no sign"]
    assert bits["signs on keys only"] == pytest.approx(3.5, abs=0.04)
    assert bits["protected tokens"] > bits["full"]
    errors = {name: result[name].leave_one_out.against_frozen.residues.relative_rms_error for name in PAPER_ABLATION}
    assert len(set(errors.values())) == len(errors)
    assert errors["no sign"] > errors["full"]


def test_the_embedded_model_on_a_real_protein(turbo: TurboEsm) -> None:
    sequence = "VLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAV"
    result = turbo.evaluate(sequence, ["paper"], extend_ks=(8,), refresh_ws=(0, 8), outlier_scales=())
    paper = result["paper"]
    assert result.provenance.model == "esm2-mini"
    assert result.frozen.leave_one_out.residues.relative_rms_error < 1e-5
    assert paper.leave_one_out.against_frozen.residues.cosine_mean > 0.96
    assert paper.leave_one_out.against_frozen.residues.kl_mean < 0.03
    unrefreshed, refreshed = (e.against_full for e in result.frozen.extend)
    assert unrefreshed and refreshed
    assert refreshed.residues.relative_rms_error < unrefreshed.residues.relative_rms_error
    assert "/" not in json.dumps([result.provenance.model, result.to_dict()["frozen"]])
