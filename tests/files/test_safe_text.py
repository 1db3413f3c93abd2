"""Control characters and formulas: neutralised, and restored exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esm_turbo.files.safe_text import cell, from_cell, from_visible, visible, without_controls

# Dense in what the rules look at.
texts = st.text(st.sampled_from("\\x1b7f8u202e0'=+-@\t\r\n\x1b\x7f\x85\u202e\u2028＝ aé1.")) | st.text()


@given(texts)
def test_everything_is_restored(text):
    assert from_visible(visible(text)) == text
    assert from_cell(cell(text)) == text


@given(texts)
def test_nothing_harmful_is_left(text):
    for shown in (visible(text), cell(text), without_controls(text)):
        assert not any(
            ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202a\u202b\u202c\u202d\u202e\u2028\u2029" for c in shown
        )
    if cell(text)[:1] in tuple("=+-@＝"):
        float(text)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_harmless_text_is_unchanged(text):
    assert without_controls(text) == text
    if "\\x" not in text and "\\u" not in text:
        assert visible(text) == text
        if text.lstrip("'")[:1] not in tuple("=+-@＝＋－＠"):
            assert cell(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\\b", "a\\b"),
        ("\\\\server\\x", "\\\\server\\x"),
        ("\\x1b", "\\\\x1b"),
        ("\\\x1b", "\\\\\\x1b"),
        ("a\u202eb", "a\\u202eb"),
        ("é'ñ", "é'ñ"),
    ],
)
def test_controls_become_escapes(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3", "'-2+3"),
        ("+x", "'+x"),
        ("'=1", "''=1"),
        ("\t=1", "'\\x09=1"),
        ("-2.5", "-2.5"),
        ("-1e-05", "-1e-05"),
        ("-inf", "-inf"),
        ("'quoted'", "'quoted'"),
        ("a=1", "a=1"),
        ("", ""),
    ],
)
def test_formulas_get_an_apostrophe(text, shown):
    assert cell(text) == shown
