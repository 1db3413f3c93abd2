"""The example of the demo, against the public methods."""

import io

import pytest
from rich.console import Console

from esm_turbo.cli import demo
from esm_turbo.cli.report import demo_report
from esm_turbo.config import PRESETS


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "CALIBRATION_PROTEINS", 4)
        patch.setattr(demo, "EVALUATION_PROTEINS", 1)
        patch.setattr(demo, "PRODUCT_PRESETS", {name: PRESETS[name] for name in ("exact", "turbo3")})
        stages = []
        found = demo.run_demo("cpu", lambda *report: stages.append(report))
    return found, stages


def test_steps_are_timed_and_reported(result):
    (found, evaluation), stages = result
    assert found["evaluation"] == evaluation.to_dict()
    assert list(found["seconds"]) == ["load", "calibrate", "prefill and extend", "compare"]
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["calibrate", "leave-one-out", "extend"]
    for stage in ("calibrate", "leave-one-out", "extend"):
        _, done, total = [report for report in stages if report[0] == stage][-1]
        assert done == total > 0


def test_the_example_agrees_with_the_exact_run(result):
    example = result[0][0]["example"]
    assert example["preset"] == "turbo3"
    assert example["new"] == 8 and 0 <= example["top1"] <= 8
    assert 0.95 < example["cosine"] <= 1
    # 3 of 32 bits per element, and the overhead of a short context.
    elements = 2 * 12 * 256 * (example["context"] + 1)
    assert 3 * elements / 8 < example["nbytes"] < 8 * elements / 8


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_ends_with_a_whole_sentence(result, width):
    found, evaluation = result[0]
    out = io.StringIO()
    for part in demo_report(found, evaluation):
        Console(file=out, width=width).print(part)
    assert "exact is frozen, not compressed: its loss comes from not updating the context." in " ".join(
        out.getvalue().split()
    )
