"""Writes the tables of README.md and docs/ from the files in benchmarks/results/.

    python -m benchmarks.report.tables [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`; everything in between is replaced. `--check` writes
nothing and exits 1 where a file is not what the results say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import tables_accuracy, tables_attack, tables_gpu, tables_scoring, tables_serving, tables_storage

ROOT = Path(__file__).resolve().parents[2]
_MODULES = (tables_accuracy, tables_attack, tables_gpu, tables_scoring, tables_serving, tables_storage)
TABLES: dict[str, Callable[[], str]] = {name: make for module in _MODULES for name, make in module.TABLES.items()}
_MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """The text with every marked table replaced.

    Raises:
        ValueError: there is no table of that name.
    """
    unknown = sorted({name for _, name, _ in _MARKED.findall(text)} - set(TABLES))
    if unknown:
        raise ValueError(f"no such table: {', '.join(unknown)}; there are {', '.join(TABLES)}")
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        new = render(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(
            f"not what benchmarks/results says: {', '.join(stale)}; run python -m benchmarks.report.tables",
            file=sys.stderr,
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
