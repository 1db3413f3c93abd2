"""Every promise of docs/guarantees.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
PROMISES = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize(("path", "name"), re.findall(r"^- `(tests/[\w/]+\.py)::(\w+)`$", TEXT, flags=re.MULTILINE))
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda text: text.partition("\n")[0])
def test_every_promise_names_its_tests(promise: str) -> None:
    title = promise.partition("\n")[0]
    assert ("::test_" in promise) == (title not in ("The attack", "What is not promised"))
