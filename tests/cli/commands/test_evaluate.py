"""`esm-turbo evaluate`: named presets, all presets, and figures as JSON."""

import json

from esm_turbo.config import COMPARISON_PRESETS, PRESETS
from tests.helpers.models import E1_MINI


def test_evaluate(esm, fasta, tmp_path, tiny_folder, tiny_calibration):
    arguments = ["evaluate", fasta, "--model", tiny_folder, "--calibration", tiny_calibration(seed=0),
                 "--preset", "exact", "paper", "--max-proteins", "2", "--extend-ks", "4", "--refresh_ws", "0",
                 "2"]  # fmt: skip
    result = esm(*arguments, "--json", tmp_path / "figures.json")
    assert (result.code, result.err) == (0, "")
    assert "paper" in result.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [preset["name"] for preset in figures["presets"]] == ["exact", "paper"]
    assert figures["provenance"]["proteins"] == 2
    again = esm(*arguments, "--json", "-")
    assert json.loads(again.out) == figures


def test_all_presets(esm, write, tmp_path, tiny_folder, tiny_calibration):
    fasta = write("some.fasta", ">a\nMKTAYIAKQRQISFVKSHFSRQ\n")
    options = ["--preset", "all", "--extend-ks", "2", "--refresh-ws", "0"]
    model = ["--model", tiny_folder, "--calibration", tiny_calibration(seed=0)]
    result = esm("evaluate", fasta, *options, *model, "--json", tmp_path / "figures.json")
    assert result.code == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [preset["name"] for preset in figures["presets"]] == list(PRESETS)
    for name in COMPARISON_PRESETS:
        # Leave-one-out and extension; memory shows the name alone.
        assert result.out.count(f"{name} - frozen") == 2


def test_families_of_e1(esm, write):
    options = ["--model", E1_MINI, "--preset", "exact", "--json", "-"]
    fasta = write(
        "families.fasta", ">a family=1\nMKTAYIAK\n>x\nMK\n>b family=1\nMKTAYIAR\n>c family=2\nMK\n>d family=2\nMR\n"
    )
    for given, number, residues in ((fasta, 1, 8), (fasta, 9, 10), ("shipped", 1, None)):
        result = esm("evaluate", given, *options, "--max-proteins", str(number))
        about = json.loads(result.out)["provenance"]
        assert result.code == 0 and about["proteins"] == min(number, 2)
        assert residues is None or about["residues"] == residues
    result = esm("evaluate", write("alone.fasta", ">a\nMKTAYIAK\n"), *options)
    assert result.code == 2 and "there are no families of homologs" in result.err
