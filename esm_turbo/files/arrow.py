"""The optional package pyarrow, which reads and writes Parquet."""

from __future__ import annotations

from typing import Any

from esm_turbo.files.extras import install_hint


def pyarrow() -> Any:
    """The package pyarrow.

    Raises:
        ImportError: it is missing.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"Parquet needs pyarrow: {install_hint('parquet')}") from error
    return arrow
