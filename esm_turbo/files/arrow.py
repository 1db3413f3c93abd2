"""The optional package pyarrow, which reads and writes Parquet."""

from __future__ import annotations

from typing import Any


def pyarrow() -> Any:
    """The package pyarrow.

    Raises:
        ImportError: it is missing.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'esm-turbo[parquet]'") from error
    return arrow
