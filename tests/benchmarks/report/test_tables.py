"""The tables of README.md and the docs: what the results say, and what their parts say of small results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack.__main__ import KINDS
from benchmarks.attack.engines import ENGINES
from benchmarks.harness import records, stored
from benchmarks.report import tables, tables_attack, tables_gpu, tables_scoring, tables_serving
from benchmarks.report.markdown import cosine, small, source
from benchmarks.serve import __main__ as load


def test_tables_equal_the_results():
    assert tables.main(["--check"]) == 0


def test_a_figure_edited_by_hand_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = tmp_path / "docs" / "notes" / "page.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "README.md").touch()
    page.write_text("before\n<!-- table overview -->\n| `turbo3` | 0.9999 |\n<!-- end -->\nafter\n")
    assert tables.main(["--check"]) == 1
    assert "page.md" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| 0.9999 |" not in text


# Those of a CUDA device are not of the embedded model, see tests/benchmarks/cuda.
@pytest.mark.parametrize("name", sorted(tables.TABLES.keys() - tables_gpu.TABLES.keys()))
def test_every_table_names_commit_model_and_versions(name):
    text = tables.TABLES[name]()
    model = {"homologs": "e1-mini", "frozen_queries": "e1-mini", "identity_cost": "650M"}.get(name, "esm2-mini")
    measured = (model, "commit", "torch", "transformers", "float32")
    # Sizes follow from a geometry alone.
    words = ("no weights are needed", "memory.jsonl`") if name == "memory_by_geometry" else measured
    assert all(word in text for word in words)


@pytest.mark.parametrize(("x", "text"), [(0, "0"), (12.3, "12"), (0.0123, "0.012"), (2e-9, "2e-09")])
def test_two_digits(x: float, text: str) -> None:
    assert small(x) == text


def test_cosine_and_source() -> None:
    assert cosine({"cosine_mean": 0.98687, "cosine_q01": 0.9616}) == "0.98687 (0.9616)"
    record = {
        "environment": {"processor": "Xeon", "versions": {"torch": "2.11.0", "transformers": "5.17.0"}},
        "revision": {"commit": "0123456789abcdef", "dirty": True},
    }
    text = source(record, "accuracy", "a model")
    for part in ("a model", "Xeon", "torch 2.11.0", "transformers 5.17.0", "0123456789", "results/accuracy.jsonl`"):
        assert part in text
    assert "abcdef" not in text and "change" in text
    other = {
        "environment": {"processor": "EPYC", "versions": {"torch": "2.13.0", "transformers": "5.23.0"}},
        "revision": {"commit": "9876543210abcdef", "dirty": False},
    }
    both = source(record, "accuracy", others=[record, other])
    assert "(Xeon), torch 2.11.0, transformers 5.17.0, commit 0123456789 with local changes and" in both
    assert "(EPYC), torch 2.13.0, transformers 5.23.0, commit 9876543210;" in both


def test_the_table_of_both_families_names_the_run_of_each() -> None:
    [said] = [line for line in tables.TABLES["families"]().splitlines() if "Measured" in line]
    for name, kind in (("esm2-mini", "accuracy"), ("esmc-mini", "families")):
        commit = stored.accuracies("cath_val200", kind=kind)["turbo3"]["revision"]["commit"][:10]
        one = said[said.index(f"Measured with {name} ") :].partition("jsonl`")[0]
        assert commit in one and one.endswith(f"results/{kind}.")


def test_a_table_uses_one_run_without_older_groups(results: Path) -> None:
    path = results / "screening.jsonl"
    for limit, spearman in ((8, 0.1), (None, 0.9)):
        for group in (1, 2):
            arms = {"full": {"ahead_of_shuffled": 0.5}, "frozen, masked, 8": {"spearman": spearman}}
            row = {
                "case": f"group {group} of 2",
                "shape": {"max_targets": limit},
                "targets_scored": [{"target": "x", "arms": arms}],
            }
            records.append(path, "screening", row)
    # Runs are told apart by their dates, which could be equal within a second.
    lines = path.read_text().splitlines()
    old = [line.replace('"date": "2', '"date": "1') for line in lines[:2]]
    path.write_text("\n".join([*old, *lines[2:]]) + "\n")
    assert len(tables_scoring.screening_records()) == 2
    assert tables_scoring.screened()["frozen, masked, 8"] == {"spearman": 0.9, "lowest_spearman": 0.9}


def test_the_newest_attack_of_an_hour_is_shown_with_every_kind_of_trial(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: "a processor")
    for seconds, trials in ((3600.0, 1), (3600.0, 2000), (60.0, 3)):
        figures = {
            "seconds": seconds, "seed": 7, "workers": 2, "command": "it",
            "trials": {"kills": trials, "text": 4}, "trials_total": trials + 4,
            "findings": {"text": {"hang": 1, "traceback": 2}}, "findings_total": 3, "quoted": {},
        }  # fmt: skip
        records.append(results / "attack.jsonl", "attack", figures, model="esm2-mini")
    stored.forget()
    lines = tables_attack.attack().splitlines()
    assert lines[2] == "| a command killed at one of its operations on files, and run again | 2,000 | 0 |"
    assert "| FASTA, CSV and other text damaged | 4 | 3 |" in lines
    assert "| a calibration damaged | 0 | 0 |" in lines
    assert "| all | 2,004 | 3 |" in lines
    assert any(line.startswith("`make attack SECONDS=3600 SEED=7 JOBS=2`") for line in lines)


def test_every_kind_of_trial_and_engine_has_words() -> None:
    assert tables_attack._TRIED.keys() == set(KINDS)
    assert tables_attack._KILLED.keys() == set(ENGINES)


def test_kills_of_all_runs_are_added(results: Path) -> None:
    counts = {"trials": 2, "kills": 3, "findings": 0, "seconds": 1.0}
    one = {"workers": {"embed": counts, "embed h5": counts}, "shards": {"store": counts | {"findings": 1}}}
    for seed, by_engine in ((1, one), (1, one), (2, {"ray driver": {"score": counts}}), (2, one)):
        figures = {"seed": seed, "command": f"campaign {seed}", "by_engine": by_engine}
        records.append(results / "kills.jsonl", "kills", figures, model="esm2-mini")
    stored.forget()
    lines = tables_attack.kills().splitlines()
    # The second run of the same seed and engines replaces the first.
    assert lines[2:6] == [
        "| `--workers`: a worker | `embed` | 8 | 12 | 0 |",
        "| `--shard`: a shard | `store` | 4 | 6 | 2 |",
        "| `--engine ray`: the process that started the run | `score` | 2 | 3 | 0 |",
        "| all |  | 14 | 21 | 2 |",
    ]
    assert lines[7].startswith("3 campaigns of `python -m benchmarks.attack.campaign`, whose options are in the file. ")


def _figures(command: str, rate: float, clients: int = 64) -> dict[str, Any]:
    targets = {name: {"found": 0, "at_most": 0, "met": True} for name in tables_serving._ROWS}
    targets["throughput / the library's"] = {"found": rate, "at_least": 0.8, "met": rate >= 0.8}
    return {
        "command": command, "clients": clients, "contexts": 200, "dtype": "float32", "load": {"seconds": 120.4},
        "targets": targets,
    }  # fmt: skip


def test_the_newest_run_on_each_device_is_shown_and_a_missed_target_is_bold(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: f"a {device}")
    for command, device, rate, clients in (
        ("old", "cpu", 0.1, 64),
        ("new", "cpu", 1.25, 64),
        ("small", "cpu", 0.3, 8),
        ("on --device cuda", "cuda", 0.5, 64),
    ):
        records.append(
            results / "serve.jsonl", "serve", _figures(command, rate, clients), model="esm2-mini", device=device
        )
    stored.forget()
    text = tables_serving.serving()
    lines = text.splitlines()
    assert lines[0] == "| what | a cpu, float32 | a cuda, float32 | asked |"
    assert lines[2] == "| requests per second, against one call of the library each | 1.25 | **0.50** | at least 0.8 |"
    assert "| errors among the answers | 0 | 0 | 0 |" in lines
    assert "`new`: esm2-mini, 64 clients on 200 contexts for 120 s" in text
    assert "small" not in text


def test_every_target_of_the_benchmark_is_a_row() -> None:
    figures = {
        "load": {"ratio": 1.0, "errors": 0, "worst_difference": 0.0},
        "quarter": {"ratio": 1.0, "errors": 0, "worst_difference": 0.0},
        "malformed": {"not_4xx": 0, "traceback": False, "grown_bytes": 0},
        "kill": {"lost": 0, "damaged": 0, "errors": 0, "worst_difference": 0.0, "exit_code": 0},
        "dtype": "float32",
    }
    assert load._targets(figures).keys() == tables_serving._ROWS.keys()
