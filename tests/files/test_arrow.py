"""pyarrow is optional."""

from __future__ import annotations

import re
import sys

import pyarrow
import pytest

from esm_turbo.files import arrow
from esm_turbo.files.extras import install_hint


def test_the_package_with_its_reader() -> None:
    assert arrow.pyarrow() is pyarrow and pyarrow.parquet


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=rf"Parquet needs pyarrow: {re.escape(install_hint('parquet'))}"):
        arrow.pyarrow()
