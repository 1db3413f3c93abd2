"""Optional packages, and how to install what they need."""

from __future__ import annotations

import importlib.metadata
import re
import sys

import pyarrow as installed
import pytest

from esm_turbo.files.extras import import_extra, install_hint, pyarrow


def test_packages_are_named_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2",
        'h5py>=3.13; extra == "h5"',
        "a<2,>=1; os_name == 'posix' and extra == 'two'",
        "b; extra == 'two'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert install_hint("h5") == "pip install 'h5py>=3.13'"
    assert install_hint("two") == "pip install 'a<2,>=1' 'b'"
    assert install_hint("other") == "pip install 'esm-turbo[other]'"


def test_without_metadata_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_hint("h5") == "pip install 'esm-turbo[h5]'"


def test_a_package_is_imported_or_its_extra_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pyarrow() is installed and installed.parquet
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=rf"Parquet needs pyarrow: {re.escape(install_hint('parquet'))}"):
        pyarrow()
    with pytest.raises(ImportError, match="this needs none_such: pip install"):
        import_extra("none_such", "h5", "this needs")
