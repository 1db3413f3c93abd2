"""Tables of text: alignment, titles, and captions."""

from __future__ import annotations

import io

from rich.console import Console

from esm_turbo.files.text_tables import text_table

ROWS = [["a", "1"], ["bcd", "234"]]


def lines_of(table: object, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def test_the_first_column_is_left_and_the_others_right() -> None:
    lines = lines_of(text_table("title", ["name", "count"], ROWS, caption="note"))
    assert lines[0].strip() == "title"
    assert "│ a    │     1 │" in lines
    assert "│ bcd  │   234 │" in lines
    assert lines[-1].strip() == "note"


def test_a_caption_stays_in_one_line() -> None:
    caption = "much longer than the table that it stands below"
    assert lines_of(text_table("", ["name", "count"], ROWS, caption=caption))[-1].strip() == caption


def test_long_cells_are_folded_not_cut() -> None:
    lines = lines_of(text_table("", ["sequence"], [["MKTAYIAKQR" * 5]]), width=24)
    assert "".join(line.strip("│ ") for line in lines[3:-1]) == "MKTAYIAKQR" * 5


def test_a_narrow_table_leaves_out_columns_before_its_texts_are_unreadable() -> None:
    columns, rows = ["name", "much longer", "count"], [["MKTAYIAKQR" * 2, "1", "2"]]
    lines = lines_of(text_table("", columns, rows, spare=[1], caption="note"), width=35)
    assert [line.strip() for line in lines[3:]] == [
        *("│ MKTAYIAKQRMKTAYIAKQR │     2 │", "└──────────────────────┴───────┘"),
        *("note", "1 more column in a wider terminal"),
    ]
    assert "much longer" in "".join(lines_of(text_table("", columns, rows, spare=[1]), width=36))


def test_foreign_text_is_neither_markup_nor_control() -> None:
    lines = lines_of(text_table("[/x]", ["name"], [["[bold]a[/b]"], ["b\x1b[2J\r"]]))
    assert lines[0].strip() == "[/x]"
    assert "│ [bold]a[/b]  │" in lines
    assert "│ b\\x1b[2J\\x0d │" in lines
