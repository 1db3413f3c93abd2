"""Hooks of the documentation site, see mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write the name of a command once: the plugin puts it before a usage line that has it."""
    return re.sub(r"esm-turbo ([a-z]+) \1\b", r"esm-turbo \1", markdown)
