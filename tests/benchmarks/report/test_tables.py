"""Every table of the README and the docs is what the results say."""

import pytest

from benchmarks.report import tables, tables_gpu


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


# They follow from a geometry: no weights, no run.
ARITHMETIC = {"memory_by_geometry"}


def test_bytes_of_geometries_name_their_file():
    text = tables.TABLES["memory_by_geometry"]()
    assert "`benchmarks/results/memory.jsonl`" in text
    assert "no weights are needed" in text


# Those of a CUDA device are not of the embedded model, see tests/benchmarks/cuda.
@pytest.mark.parametrize("name", sorted(tables.TABLES.keys() - tables_gpu.TABLES.keys() - ARITHMETIC))
def test_every_table_names_commit_model_and_versions(name):
    text = tables.TABLES[name]()
    for word in ("esm2-mini", "commit", "torch", "transformers", "float32"):
        assert word in text
