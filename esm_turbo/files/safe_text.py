"""Foreign text, such as identifiers, where it could act: control characters on a terminal, formulas in a spreadsheet.

`visible` writes each control character as an escape like `\\x1b`, and `cell` also puts an apostrophe before text that a
spreadsheet would run. Both change no other text, and `from_visible` and `from_cell` undo them exactly: text that looks
escaped already gets twice its backslashes, or one more apostrophe.
"""

from __future__ import annotations

import re

# C0, delete and C1; direction marks and overrides; separators of lines and paragraphs.
_CONTROLS = "\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069"
_ESCAPES = r"x(?:[01][0-9a-f]|7f|[89][0-9a-f])|u20(?:0[ef]|2[89a-e]|6[6-9])"
_TO_ESCAPE = re.compile(rf"(\\*)(?:([{_CONTROLS}])|(?={_ESCAPES}))")
_ESCAPED = re.compile(rf"(\\+)({_ESCAPES})")
# What spreadsheets take for the beginning of a formula, after apostrophes of ours; full-width forms included.
_FORMULA = re.compile("'*[=+\\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan")


def visible(text: str) -> str:
    """Text with control characters as escapes; undone by `from_visible`."""
    return _TO_ESCAPE.sub(lambda found: 2 * found[1] + (_escape(found[2]) if found[2] else ""), text)


def from_visible(text: str) -> str:
    """Undo `visible`."""

    def original(found: re.Match[str]) -> str:
        pairs, odd = divmod(len(found[1]), 2)
        return "\\" * pairs + (chr(int(found[2][1:], 16)) if odd else found[2])

    return _ESCAPED.sub(original, text)


def without_controls(text: str) -> str:
    """Text with control characters as escapes, for messages that nobody reads back."""
    return re.sub(f"[{_CONTROLS}]", lambda found: _escape(found[0]), text)


def cell(text: str) -> str:
    """Text for a cell of a table that a spreadsheet may open; numbers stay numbers. Undone by `from_cell`."""
    harmful = _FORMULA.match(text) and not _NUMBER.fullmatch(text)
    return "'" * bool(harmful) + visible(text)


def from_cell(text: str) -> str:
    """Undo `cell`."""
    text = from_visible(text)
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
