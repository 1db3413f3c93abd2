"""`--plot` of every command that has one."""

from __future__ import annotations

import re

import pytest

TWO = ">wt\nMKTAYIAKQRQISFVK\n>two\nGSGSPLLKRRACDEFG\n"


@pytest.fixture
def proteins(write):
    return write("two.fasta", TWO)


@pytest.mark.parametrize(
    ("command", "options", "title"),
    [
        ("variants", ["--method", "wild_type"], "wt: effects of substitutions, 16 residues"),
        ("score", ["{peptides}", "--arm", "turbo"], "wt: 1 candidate, target of 16 residues"),
        ("generate", ["--positions", "3-5", "--num-return-sequences", "2"], "wt: 2 designs, 3 new residues"),
    ],
)
def test_pages_of_commands(esm_shared, proteins, write, tmp_path, command, options, title):
    files = {"peptides": write("peptides.fasta", ">p\nGSW\n")}
    plot = tmp_path / "page.html"
    code, _, err = esm_shared(command, proteins, *(option.format(**files) for option in options), "--plot", plot)
    assert (code, err) == (0, f"esm-turbo: picture written to {plot}\n")
    titles = re.findall(r"<h1>(.*?)</h1>", plot.read_text(encoding="utf-8"))
    assert titles[0].startswith(title)
    assert len(titles) == 2
    assert "model esm2-mini" in plot.read_text(encoding="utf-8")


def test_calibrations_and_evaluations(esm, fasta, tiny_folder, tmp_path):
    model = ["--model", tiny_folder]
    made = esm("calibrate", fasta, *model, "--out", tmp_path / "c.safetensors", "--plot", tmp_path / "c.html")
    assert (made.code, made.err) == (0, f"esm-turbo: picture written to {tmp_path / 'c.html'}\n")
    assert "<h1>Calibration on 3 proteins" in (tmp_path / "c.html").read_text(encoding="utf-8")
    off = ["--extend-ks", "--preset", "exact"]
    made = esm("evaluate", fasta, *model, *off, "--plot", tmp_path / "e.html")
    assert (made.code, made.err) == (0, f"esm-turbo: picture written to {tmp_path / 'e.html'}\n")
    assert "<h1>1 preset on 3 proteins" in (tmp_path / "e.html").read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_refused_before_any_work(esm_shared, proteins, write, tmp_path):
    refused = {
        "map.png": "a PNG holds one picture, there are 2; use .html or .pdf",
        "map.gif": "must end in .html, .pdf, .png or .svg; got .gif",
    }
    for name, message in refused.items():
        result = esm_shared("variants", proteins, "--plot", tmp_path / name)
        assert result.code == 2 and result.error.endswith(message)
    result = esm_shared("variants", proteins, "--plot", proteins)
    assert result.code == 2 and "is an input of this command" in result.error
    assert [path.name for path in tmp_path.iterdir()] == ["two.fasta"]


def test_a_png_of_several_targets_is_their_heat_map(esm_shared, proteins, write, tmp_path):
    plot, peptides = tmp_path / "heat.png", write("peptides.txt", "GSW\nWTC\n")
    made = esm_shared("score", proteins, peptides, "--plot", plot)
    rest = "the heat map alone; .html and .pdf also show each of the 2 targets"
    assert (made.code, made.err) == (0, f"esm-turbo: picture written to {plot}: {rest}\n")
    # One candidate has no heat map.
    refused = esm_shared("score", proteins, write("one.txt", "GSW\n"), "--plot", tmp_path / "one.png")
    assert refused.code == 2 and "a PNG holds one picture, there are 2" in refused.error


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg", ".html"])
def test_a_picture_is_drawn_again_in_its_place(esm_shared, write, tmp_path, suffix):
    one, plot = write("one.fasta", ">wt\nMKTAY\n"), tmp_path / f"map{suffix}"
    for _ in range(2):
        code, _, err = esm_shared("variants", one, "--method", "wild_type", "--plot", plot)
        assert (code, err) == (0, f"esm-turbo: picture written to {plot}\n")
    code, _, err = esm_shared("variants", one, "--method", "wild_type", "--json", plot)
    if suffix in (".png", ".pdf"):
        assert code == 2 and f"{plot}: is a picture, which would be replaced" in err
    else:
        assert code == 0
