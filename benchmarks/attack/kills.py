"""Commands that are killed at one of their operations on files, then run again to the end."""

from __future__ import annotations

import functools
import random
from pathlib import Path

from benchmarks.attack.commands import COMMANDS, References, run_to_end, write_inputs
from benchmarks.attack.operations import Operations
from benchmarks.attack.trial import Finding, about, command


@functools.cache
def count_operations(name: str, references: References) -> int:
    """Number of operations on files of an undisturbed command."""
    folder = references.root / f"count-{name.replace(' ', '-')}"
    write_inputs(folder)
    counted = folder.parent / f"{folder.name}.count"

    def count() -> None:
        operations = Operations(folder)
        operations.install()
        operations.report(counted)

    ended = command(folder, COMMANDS[name], count)
    if ended.code:
        raise RuntimeError(f"esm-turbo {' '.join(COMMANDS[name])} failed while operations were counted: {ended.err}")
    return int(counted.read_text())


def kill(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """One command, killed once or twice, and run again: the files of an undisturbed run, bit for bit, and no others."""
    name = rng.choice(list(COMMANDS))
    total = count_operations(name, references)
    write_inputs(folder)
    where = []
    for _ in range(rng.choice((1, 1, 2))):
        at, how = rng.randrange(total), rng.choice(("kill", "half"))
        where.append(f"{how} at {at} of {total}")
        ended = command(folder, COMMANDS[name], lambda at=at, how=how: Operations(folder, at, how).install())
        if ended.code >= 0:
            # The second run may have less to do than the first.
            break
    return about(f"{name}, {', '.join(where)}", run_to_end(folder, name, references))
