"""Optional packages, and how to install them."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any


def install_hint(extra: str) -> str:
    """The pip command for the packages of an extra, by their own names: it works wherever esm-turbo came from."""
    try:
        requirements = importlib.metadata.requires("esm-turbo") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    parts = (one.partition(";") for one in requirements)
    names = [name.strip() for name, _, marker in parts if f'extra == "{extra}"' in marker.replace("'", '"')]
    return "pip install " + " ".join(f"'{name}'" for name in names or [f"esm-turbo[{extra}]"])


def import_extra(package: str, extra: str, need: str, *modules: str) -> Any:
    """Import an optional package.

    Args:
        package: its name.
        extra: that names it among the requirements.
        need: the feature, as the error begins.
        modules: of the package, to be imported with it.

    Raises:
        ImportError: it is missing.
    """
    try:
        imported = importlib.import_module(package)
        for name in modules:
            importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise ImportError(f"{need} {package}: {install_hint(extra)}") from error
    return imported


def pyarrow() -> Any:
    """The package pyarrow, which reads and writes Parquet.

    Raises:
        ImportError: it is missing.
    """
    return import_extra("pyarrow", "parquet", "Parquet needs", "parquet")
