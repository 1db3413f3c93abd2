"""Files of pictures, and what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from esm_turbo.pictures import Picture, draw
from esm_turbo.pictures.picture import MOST_SHEETS, check_picture
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.scoring.records import ScoringRun
from esm_turbo.tasks.variants.records import VariantsRun


def test_every_format(variants, tmp_path, monkeypatch) -> None:
    picture = draw(variants)
    monkeypatch.setattr("esm_turbo.pictures.picture._DPI", 50)
    for suffix, begins in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".HTML", b"<!DOCTYPE html>")):
        path = tmp_path / f"map{suffix}"
        picture.save(path)
        assert path.read_bytes().startswith(begins)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".HTML", ".pdf", ".png", ".svg"]
    assert picture._repr_png_().startswith(b"\x89PNG") and "effects of substitutions" in repr(picture)


def test_an_svg_is_the_same_every_time_and_loads_nothing(variants, tmp_path) -> None:
    for name in ("a.svg", "b.svg"):
        draw(variants).save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    links = [
        value
        for element in ElementTree.parse(tmp_path / "a.svg").iter()
        for name, value in element.attrib.items()
        if name.endswith("href")
    ]
    assert links and all(value.startswith(("#", "data:")) for value in links)


def test_a_pdf_has_a_page_for_each_protein(designs, tmp_path) -> None:
    Picture(draw(designs).sheets * 3).save(tmp_path / "map.pdf")
    assert (tmp_path / "map.pdf").read_bytes().count(b"/Type /Page ") == 3


@pytest.mark.parametrize(
    ("name", "sheets", "message"),
    [
        ("map.jpg", 1, r"map\.jpg: must end in \.html, \.pdf, \.png or \.svg; got \.jpg"),
        ("map", 1, "map: must end in .*; got no suffix"),
        ("map.png", 2, r"map\.png: a PNG holds one picture, there are 2; use \.html or \.pdf"),
        ("map.html", MOST_SHEETS + 1, "at most 50 proteins, there are 51"),
    ],
)
def test_names_that_cannot_hold_a_picture(name: str, sheets: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_picture(name, sheets)


def test_a_summary_stands_for_all_sheets_where_one_is_drawn(ranking, tmp_path) -> None:
    picture = draw(ScoringRun([ranking, replace(ranking, target=ProteinRecord("other", "MKT"))]))
    assert [sheet.summary for sheet in picture.sheets] == [True, False, False]
    picture.save(tmp_path / "all.svg")
    Picture(picture.sheets[:1]).save(tmp_path / "first.svg")
    assert (tmp_path / "all.svg").read_bytes() == (tmp_path / "first.svg").read_bytes()
    assert check_picture("map.png", MOST_SHEETS + 9, summary=True) == ".png"
    assert check_picture("map.html", MOST_SHEETS, summary=True) == ".html"
    with pytest.raises(ValueError, match="at most 50 proteins, there are 51"):
        check_picture("map.html", MOST_SHEETS + 1, summary=True)


def test_nothing_to_draw_and_missing_libraries(monkeypatch) -> None:
    with pytest.raises(ValueError, match="there is nothing to draw"):
        draw(VariantsRun())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "logomaker" else object())
    with pytest.raises(ImportError, match=r"pictures need logomaker: pip install"):
        draw(VariantsRun())
