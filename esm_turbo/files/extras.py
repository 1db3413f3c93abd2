"""How to install what optional features need."""

from __future__ import annotations

import importlib.metadata


def install_hint(extra: str) -> str:
    """The pip command for the packages of an extra, by their own names: it works wherever esm-turbo came from."""
    try:
        requirements = importlib.metadata.requires("esm-turbo") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    parts = (one.partition(";") for one in requirements)
    names = [name.strip() for name, _, marker in parts if f'extra == "{extra}"' in marker.replace("'", '"')]
    return "pip install " + " ".join(f"'{name}'" for name in names or [f"esm-turbo[{extra}]"])
