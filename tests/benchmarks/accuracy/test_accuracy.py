"""The experiments of accuracy: what they measure, on which proteins, and how the runner writes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import run
from benchmarks.accuracy import calibration_export, calibration_size, class_shift, paper, refinements
from benchmarks.accuracy import presets as accuracy
from benchmarks.harness import embedded, records
from benchmarks.harness.measure import Case, Check, Figures
from benchmarks.registry import BENCHMARKS, EXPERIMENTS
from esm_turbo import TurboEsm
from esm_turbo.codecs.fitting import transforms
from esm_turbo.codecs.fitting.transforms import Transform
from esm_turbo.config import COMPARISON_PRESETS, OPTIONAL_PRESETS, PRESETS, PRODUCT_PRESETS, Geometry


def case(check: float = 0.0, figures: Figures | list[Figures] | None = None) -> Case:
    """A case that measures nothing."""
    return Case(
        name="a case",
        model="a model",
        shape={"tokens": 3},
        check=lambda: Check("nothing", check, 0.5),
        measure=lambda repeats: {"repeats seen": repeats} if figures is None else figures,
    )


# --- the runner


def test_a_row_names_the_command_that_makes_it_and_no_path(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    settings = run.Settings(repeats=3, threads=2, max_proteins=5, out=out)
    assert run.run_case("memory", case(), settings) is not None
    assert run.run_case("import_time", case(), settings) is not None
    [experiment, speed] = records.read(out)
    assert experiment["kind"] == "memory"
    assert experiment["model"] == "a model"
    assert experiment["figures"]["command"] == "python -m benchmarks.run memory --threads 2 --max-proteins 5"
    assert speed["kind"] == "speed"
    assert speed["figures"]["command"] == "python -m benchmarks.run import_time --threads 2 --repeats 3"
    assert speed["figures"]["repeats seen"] == 3
    assert str(tmp_path) not in out.read_text()


def test_a_case_may_give_several_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run.run_case("memory", case(figures=[{"size": "8M"}, {"size": "35M"}]), run.Settings(out=out))
    assert rows is not None
    written = [record["figures"] for record in records.read(out, "memory")]
    assert [row["size"] for row in written] == [row["size"] for row in rows] == ["8M", "35M"]
    assert all(row["check"] == {"what": "nothing", "error": 0.0, "tolerance": 0.5} for row in written)


@pytest.mark.parametrize("error", [0.6, math.nan])
def test_what_fails_its_check_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], error: float) -> None:
    out = tmp_path / "rows.jsonl"
    assert run.run_case("memory", case(check=error), run.Settings(out=out)) is None
    assert "REFUSED" in capsys.readouterr().err
    assert not out.exists()


def test_rows_are_saved_in_the_file_of_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    settings = run.Settings(save=True)
    for name in ("ablation", "class_shift", "import_time"):
        assert run.run_case(name, case(), settings) is not None
    assert {path.name for path in tmp_path.iterdir()} == {"accuracy.jsonl", "class_shift.jsonl", "cpu.jsonl"}


def test_a_group_stands_for_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def no_cases(self: run.Settings, name: str) -> Iterator[Case]:
        seen.append((name, self.threads))
        return iter(())

    monkeypatch.setattr(run.Settings, "cases", no_cases)
    monkeypatch.setattr(run, "_prepare", lambda threads: None)
    assert run.main(["results", "--threads", "3"]) == 0
    assert seen == [(name, 3) for name in EXPERIMENTS]
    seen.clear()
    assert run.main([]) == 0
    assert seen == [(name, 2) for name in BENCHMARKS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no such benchmark: nonsense"),
        (["--jobs", "2"], "must run alone"),
        (["memory", "import_time", "--jobs", "2"], "must run alone, without --jobs: import_time"),
        (["memory", "--max-proteins", "0"], "must be at least 1"),
        (["memory", "--jobs", "0"], "must be at least 1"),
        (["memory", "--save", "--out", "x"], "not allowed with"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_prepare", lambda threads: None)
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_processes_side_by_side_write_all_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert run.run_side_by_side(["memory"], run.Settings(out=out), jobs=2) == 0
    sizes = sorted(record["figures"]["size"] for record in records.read(out, "memory"))
    assert sizes == sorted(paper.GEOMETRIES)


def test_one_failing_case_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Check:
        raise RuntimeError("out of order")

    cases = [dataclasses.replace(case(), name="broken", check=broken), case()]
    monkeypatch.setattr(run.Settings, "cases", lambda self, name: iter(cases))
    assert [run._run_one("memory", index, run.Settings()) for index in (0, 1)] == [False, True]
    assert "memory · broken: FAILED" in capsys.readouterr().err


# --- the check of every row


def test_leave_one_out_at_full_precision_agrees_with_the_plain_model() -> None:
    check = embedded.exactness(embedded.evaluation_set("paper_six", 1)[0])
    assert 0 < check.error < 1e-4
    assert check.passed


def test_the_check_finds_a_wrong_frozen_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "FROZEN", PRESETS["int8"])
    assert not embedded.exactness(embedded.evaluation_set("paper_six", 1)[0]).passed


def test_rounding_keeps_seven_digits_and_everything_else() -> None:
    assert embedded.rounded({"a": [1 / 3, True, None, "x", 7], "b": (2e-9 / 3,)}) == {
        "a": [0.3333333, True, None, "x", 7],
        "b": [6.666667e-10],
    }


# --- accuracy, outliers


def test_accuracy_covers_every_preset_and_set_once() -> None:
    cases = [case.name for case in EXPERIMENTS["accuracy"].cases(None)]
    assert len(cases) == len(set(cases)) == 3 * len(PRESETS)
    assert set(PRESETS) == {*PRODUCT_PRESETS, *COMPARISON_PRESETS}
    ablation = [case.name for case in EXPERIMENTS["ablation"].cases(None)]
    assert "paper, no rotation, no sign on cath_val200" in ablation
    assert not set(ablation) & set(cases)


def test_a_row_of_accuracy_holds_all_figures_of_its_preset() -> None:
    [one] = accuracy.preset_cases({"paper": PRESETS["paper"]}, ("paper_six",), 1)
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    assert row["proteins"] == "paper_six.fasta"
    assert row["provenance"]["residues"] == 30
    assert row["provenance"]["calibration"]["sequences"] == 640
    preset = row["preset"]
    assert preset["name"] == "paper"
    assert preset["memory"]["bits_per_element"] == pytest.approx(4, abs=0.01)
    assert preset["leave_one_out"]["against_frozen"]["residues"]["tokens"] == 30
    assert len(preset["leave_one_out"]["by_layer"]) == 12
    assert [(e["new_residues"], e["refreshed"]) for e in preset["extend"]] == [
        (k, w) for k in (1, 8, 32) for w in (0, 8, 32)
    ]


def test_optional_presets_are_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from esm_turbo.codecs.peers.hugging_face import HqqCodec, QuantoCodec

    def missing(*_: Any) -> Any:
        raise ValueError("needs optional packages")

    for codec in (QuantoCodec, HqqCodec):
        monkeypatch.setattr(codec, "_new_layer", missing)
    assert list(accuracy.optional_cases()) == []
    printed = capsys.readouterr().out
    assert all(f"{name}: needs optional packages" in printed for name in OPTIONAL_PRESETS)


def test_a_row_of_outliers_holds_one_preset_at_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "OUTLIER_CALIBRATION_PROTEINS", 2)
    monkeypatch.setattr(accuracy, "evaluation_set", lambda name, most: embedded.evaluation_set("paper_six", 1))
    presets = {name: PRESETS[name] for name in ("exact", "int4", "turbo3")}
    sizes = list(accuracy.outlier_cases(presets, 1))
    assert [one.name for one in sizes] == [f"outliers x{scale}" for scale in (1, 10, 60, 200)]
    rows = sizes[2].measure(1)
    assert isinstance(rows, list)
    found = {row["preset"]: row for row in rows}
    assert list(found) == ["int4", "turbo3"]
    assert all(row["scale"] == 60 and row["calibration_proteins"] == 2 for row in rows)
    kl = {name: row["against_frozen"]["residues"]["kl_mean"] for name, row in found.items()}
    assert kl["turbo3"] < 0.1 * kl["int4"]
    assert found["turbo3"]["drift"]["residues"]["relative_rms_error"] < 1e-4


# --- other calibrations


@pytest.mark.parametrize("grouping", [class_shift.CLASSES, class_shift.SOURCES], ids=lambda grouping: grouping.column)
def test_no_protein_is_both_calibrated_on_and_measured_on(grouping: class_shift.Grouping) -> None:
    tested, calibrations = class_shift.split(grouping)
    assert list(tested) == list(grouping.groups)
    assert list(calibrations) == [class_shift.MIXED, *grouping.groups]
    known = embedded.manifest()
    measured = [protein.id for proteins in tested.values() for protein in proteins]
    assert len(measured) == len(set(measured)) == grouping.tested * len(grouping.groups)
    for group, proteins in tested.items():
        assert {known[protein.id][grouping.column] for protein in proteins} == {group}
        assert all(60 <= len(protein.sequence) <= 350 for protein in proteins)
    for name, proteins in calibrations.items():
        assert not set(measured) & {protein.id for protein in proteins}
        # As many residues in each, up to one protein.
        assert 0.88 * grouping.max_residues < sum(len(p.sequence) for p in proteins) <= grouping.max_residues
        groups = [known[protein.id][grouping.column] for protein in proteins]
        if name == class_shift.MIXED:
            counts = [groups.count(group) for group in grouping.groups]
            assert max(counts) - min(counts) <= 1
        else:
            assert set(groups) == {name}


def test_a_group_with_too_few_proteins_is_refused() -> None:
    with pytest.raises(ValueError, match="has too few residues"):
        class_shift.split(dataclasses.replace(class_shift.CLASSES, max_residues=100_000))
    with pytest.raises(ValueError, match=r"mainly_alpha has \d+ proteins to measure on, not 500"):
        class_shift.split(dataclasses.replace(class_shift.CLASSES, tested=500))


def test_a_row_of_the_class_shift_is_of_one_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_shift, "TESTED_PRESETS", ("paper",))
    grouping = class_shift.Grouping("class", ("mainly_alpha", "mainly_beta"), max_residues=700, tested=1)
    rows = [one.measure(1) for one in class_shift.cases([grouping])]
    assert [row["calibrated_on"] for row in rows] == ["all kinds", "mainly_alpha", "mainly_beta"]
    for row in rows:
        assert row["grouping"] == "class"
        assert row["calibration_residues"] <= 700
        assert row["provenance"]["calibration"]["residues"] == row["calibration_residues"]
        assert set(row["presets"]["paper"]) == {"mainly_alpha", "mainly_beta"}
    kls = [row["presets"]["paper"]["mainly_beta"]["kl_mean"] for row in rows]
    assert len(set(kls)) == 3


def test_draws_of_calibrations_share_no_protein(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    honest = calibration_size.calibrate_records

    def watched(turbo: TurboEsm, proteins: Any, **options: Any) -> Any:
        seen.append([protein.id for protein in proteins])
        return honest(turbo, proteins, **options)

    monkeypatch.setattr(calibration_size, "calibrate_records", watched)
    monkeypatch.setattr(calibration_size, "TESTED_PRESETS", ("paper",))
    monkeypatch.setattr(calibration_size, "_STRIDES", {"paper_six": 6})
    rows = [row for one in calibration_size.cases({2: 2}) for row in one.measure(1)]
    assert [(row["calibration_proteins"], row["draw"], row["proteins"]) for row in rows] == [
        (2, 0, "paper_six.fasta"),
        (2, 1, "paper_six.fasta"),
    ]
    shipped = [protein.id for protein in embedded.shipped_proteins()]
    assert seen == [shipped[:2], shipped[2:4]]
    assert rows[0]["presets"]["paper"]["kl_mean"] != rows[1]["presets"]["paper"]["kl_mean"]
    assert max(size * count for size, count in calibration_size.DRAWS.items()) <= len(shipped)


def test_without_their_planes_caches_are_smaller_and_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinements, "evaluation_set", lambda name: embedded.evaluation_set("paper_six"))
    monkeypatch.setattr(refinements, "_STRIDE", 6)
    cases = list(refinements.cases())
    assert cases
    row = cases[-1].measure(1)
    assert isinstance(row, dict)
    whole, dropped = row["whole"], row["dropped"]
    assert dropped["bits_per_element"] < whole["bits_per_element"] - 0.01
    errors = [part["against_frozen"]["residues"]["relative_rms_error"] for part in (whole, dropped)]
    assert errors[0] < errors[1] < 1


# --- what the calibration holds


def random_moments(seed: int, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Two positive definite matrices [1, 1, size, size]."""
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((2, 1, 1, size, size))
    covariance, cost = roots @ roots.swapaxes(-1, -2)
    return covariance, cost


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_costs_do_not_see_a_scale_and_the_query_aware_basis_has_the_least_product(seed: int) -> None:
    covariance, cost = random_moments(seed)
    rng = np.random.default_rng(seed + 1)
    basis = rng.standard_normal(covariance.shape)
    some = Transform(basis, np.linalg.inv(basis))
    scale = rng.uniform(0.1, 10, (1, 1, 6, 1))
    scaled = Transform(basis * scale, some.inverse / scale.swapaxes(-1, -2))
    costs = calibration_export.component_costs(some, covariance, cost)
    np.testing.assert_allclose(calibration_export.component_costs(scaled, covariance, cost), costs, rtol=1e-6)
    own = calibration_export.component_costs(transforms.query_aware(covariance, cost), covariance, cost)
    np.testing.assert_allclose(own.sum(), np.trace((covariance @ cost)[0, 0]), rtol=1e-6)
    determinant = np.linalg.det(covariance) * np.linalg.det(cost)
    np.testing.assert_allclose(own.prod(-1), determinant, rtol=1e-5)
    assert costs.prod() >= own.prod() * (1 - 1e-6)


def test_what_the_shipped_calibration_holds() -> None:
    [one] = calibration_export.cases()
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    for name in calibration_export.TURBO_PRESETS:
        keys, values = (np.array(row["widths"][name][kind]) for kind in ("key", "value"))
        assert keys.shape == values.shape == (12, 64)
        # The codes alone, of both.
        assert (keys.mean() + values.mean()) / 2 == pytest.approx(PRESETS[name].mean_bits, abs=0.13)
        assert ((keys >= 0) & (keys <= 8)).all()
        for kind, widths in (("key", keys), ("value", values)):
            grids = row["levels"][name][kind]
            assert set(grids) == {str(width) for width in np.unique(widths) if width}
            for width, grid in grids.items():
                assert len(grid) == 2 ** int(width)
                np.testing.assert_allclose(grid, -np.array(grid)[::-1], atol=1e-6)
    for kind in ("key", "value"):
        found = {name: np.array(spectrum) for name, spectrum in row["spectra"][kind].items()}
        assert {spectrum.shape for spectrum in found.values()} == {(12, 4, 64)}
        np.testing.assert_allclose(found["variance, svd"].sum(-1), found["variance, channels"].sum(-1), rtol=0.02)
        np.testing.assert_allclose(found["cost, turbo"].sum(-1), found["cost, svd"].sum(-1), rtol=0.02)
        # The first components are worth more.
        assert (found["cost, turbo"][..., :8].sum(-1) > found["cost, turbo"][..., 8:16].sum(-1)).all()
        assert all(ratio > 1 for ratios in row["outlier_ratios"][kind].values() for ratio in ratios)


# --- the paper's tables


def test_bytes_at_the_geometry_of_650m() -> None:
    [one] = paper.memory_cases({"650M": Geometry(33, 20, 64)})
    assert one.check().passed
    row = one.measure(1)
    assert isinstance(row, dict)
    presets = row["presets"]
    assert presets["fp32"]["bytes"] == 330 * 2**20
    assert presets["paper"]["bits_per_element"] == pytest.approx(4, abs=0.001)
    for bits in (4, 3, 2, 1):
        assert presets[f"turbo{bits}"]["bits_per_element"] <= bits + 0.05


def test_prefill_of_the_papers_proteins_is_exact_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "TESTED_PRESETS", ("paper", "turbo1"))
    [one] = paper.protein_cases(1)
    row = one.measure(1)
    assert isinstance(row, dict)
    assert (row["protein"], row["residues"]) == ("insulin_B_chain", 30)
    assert row["prefill"]["cosine_mean"] == pytest.approx(1, abs=1e-9)
    assert row["prefill"]["largest_difference"] < 1e-5
    assert set(row["presets"]) == {"paper", "turbo1"}
    assert [(e["new_residues"], e["refreshed"]) for e in row["frozen"]["extend"]] == [(1, 0), (1, 8)]
