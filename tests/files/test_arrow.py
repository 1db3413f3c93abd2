"""pyarrow is optional."""

from __future__ import annotations

import sys

import pyarrow
import pytest

from esm_turbo.files import arrow


def test_the_package_with_its_reader() -> None:
    assert arrow.pyarrow() is pyarrow and pyarrow.parquet


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"Parquet needs pyarrow: pip install 'esm-turbo\[parquet\]'"):
        arrow.pyarrow()
