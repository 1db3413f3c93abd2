"""The messages in docs/troubleshooting.md are those of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.pages import blocks, language

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
# A text of the package says enough to recognise a message by, where so many of its characters are fixed, and so large a
# share of the message.
FIXED, SHARE = 12, 0.3


def templates() -> list[tuple[int, re.Pattern[str]]]:
    """The number of fixed characters of each string in the package, f-strings included, and a pattern for the rest."""
    found = []
    for path in sorted((ROOT / "esm_turbo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            fixed = sum(len(part) for part in parts if part)
            if fixed >= FIXED:
                pattern = "".join(".*" if part is None else re.escape(part) for part in parts)
                found.append((fixed, re.compile(pattern)))
    return found


TEMPLATES = templates()


def is_raised(message: str) -> bool:
    """Whether the package has the text of a message, behind the file and record that it may begin with.

    Two texts may be joined by a semicolon, and three dots stand for what the page leaves out.
    """
    message = " ".join(message.split())
    texts = [message, *(message[match.end() :] for match in re.finditer(r": |, record '.*?': ", message))]
    if any(fixed >= SHARE * len(text) and template.fullmatch(text) for text in texts for fixed, template in TEMPLATES):
        return True
    return any(
        is_raised(message[: joint.start()]) and is_raised(message[joint.end() :])
        for joint in re.finditer("; ", message)
    )


MESSAGES = [block.parsed for block in blocks(PAGE) if language(block) == "text"]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:60].strip())
def test_message_is_raised(message: str) -> None:
    assert is_raised(message)


@pytest.mark.parametrize(
    "message",
    [
        "the cache has 2 rows, but there are 3 proteins",
        "'H24C': residue 24 is L; does the protein begin with residue 1?",
        "a.fasta: no such message",
    ],
)
def test_another_message_is_not(message: str) -> None:
    assert not is_raised(message)


def test_each_message_stands_once() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 8
