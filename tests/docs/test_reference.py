"""The documentation site names every public name, and only modules and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import esm_turbo

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTED = re.compile(r"^::: (esm_turbo[\w.]+)$", re.MULTILINE)
NAMED = re.compile(r"`(esm_turbo\.[\w.]+)`")


def resolve(dotted: str) -> object:
    """The module or attribute of a dotted name."""
    module, rest = dotted, []
    while True:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        found = getattr(found, name)
    return found


def test_every_public_name_is_documented() -> None:
    documented = {name for page in PAGES for name in DOCUMENTED.findall(page.read_text())}
    public = {f"esm_turbo.{name}" for name in esm_turbo.__all__ if name != "__version__"}
    assert public <= documented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    for name in {*DOCUMENTED.findall(text), *NAMED.findall(text)}:
        resolve(name)


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        resolve("esm_turbo.config.NoSuchName")
    with pytest.raises(AttributeError):
        resolve("esm_turbo.no_such_module.name")


def test_every_page_stands_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    assert [str(p.relative_to(DOCS)) for p in PAGES if f" {p.relative_to(DOCS)}\n" not in navigation] == []
