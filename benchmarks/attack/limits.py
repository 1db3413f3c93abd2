"""Disks that are full or read-only, and too little memory."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.attack.commands import COMMANDS, References, differences, outputs, protein, run_to_end, write_inputs
from benchmarks.attack.kills import count_operations
from benchmarks.attack.operations import Operations
from benchmarks.attack.trial import Finding, Outcome, about, command, faults
from benchmarks.harness.measure import status_bytes
from esm_turbo.files.writing import LOCK_FILE

_MIB = 2**20


def disk(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """A disk that is full or read-only from some moment on, or a limit of file sizes: an error that names a file.

    Afterwards the same command ends with the files of an undisturbed run.
    """
    name = rng.choice(list(COMMANDS))
    expected, total = references.files(name), count_operations(name, references)
    write_inputs(folder)
    how = rng.choice(("full", "full", "read-only", "file size"))
    disturb: Callable[[], object]
    if how == "file size":
        largest = rng.randrange(int(1.2 * max(map(len, expected.values()))))
        said = f"files of at most {largest} bytes"
        disturb = partial(_limit, resource.RLIMIT_FSIZE, largest)
    else:
        at = 0 if how == "read-only" else rng.randrange(total)
        said = f"{how} from operation {at} of {total}"
        disturb = Operations(folder, at, "full" if how == "full" else "read-only").install
    outcome = command(folder, COMMANDS[name], disturb)
    findings = faults(outcome)
    if outcome.code == 0:
        findings += differences(outputs(folder), expected)
    else:
        findings += _about_a_disk(outcome, name, folder, read_only=how == "read-only")
        findings += run_to_end(folder, name, references)
    return about(f"{name}, {said}", findings)


def _about_a_disk(outcome: Outcome, name: str, folder: Path, *, read_only: bool) -> list[Finding]:
    findings = []
    last = outcome.err.strip()[-250:]
    if "out" not in outcome.err.partition("error:")[2]:
        findings.append(Finding("message", f"names no output: {last}"))
    left = sorted(path for path in outputs(folder) if path.endswith(".tmp") or path.startswith(".tmp"))
    if left:
        findings.append(Finding("left behind", ", ".join(left[:3])))
    if read_only and outcome.code != 2:
        findings.append(Finding("exit", f"exit code {outcome.code} for an output that can never be written: {last}"))
    # Exit code 1: the job was done when its results could not be written, unless it could not even lock them.
    begun = outcome.code == 1 and not last.endswith((f"{LOCK_FILE}'", ".parts'"))
    if begun and name in ("score", "variants", "generate") and not outcome.out.strip():
        findings.append(Finding("results lost", f"neither written nor printed: {last}"))
    return findings


def memory(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Less address space than a long protein needs: it is listed, the others are done, and no error is internal."""
    name = rng.choice(("embed pt", "store", "score", "generate", "variants", "calibrate"))
    write_inputs(folder)
    room = rng.choice((50, 100, 150, 200, 300, 400, 600, 1000)) * _MIB
    long = protein(random.Random(1), 1500, 1500)
    file = folder / ("wild_type.fasta" if name == "variants" else "proteins.fasta")
    if name == "variants":
        file.write_text(f">long\n{long}\n")
        (folder / "variants.csv").write_text("mutant\n" + f"{long[9]}10{'A' if long[9] != 'A' else 'C'}\n")
    else:
        with file.open("a") as opened:
            opened.write(f">long\n{long}\n")
    outcome = command(folder, COMMANDS[name], lambda: _limit(resource.RLIMIT_AS, status_bytes("VmSize") + room))
    findings = faults(outcome)
    if "OpenBLAS error: Memory allocation" in outcome.err:
        # The library ends the process by itself, with words of its own.
        findings = [one for one in findings if one.category != "message"]
    said = outcome.err.lower()
    if outcome.code and "memory" not in said:
        findings.append(Finding("message", f"does not speak of memory: {outcome.err.strip()[-250:]}"))
    if outcome.code and "damaged" in said:
        findings.append(Finding("message", f"speaks of damage: {outcome.err.strip()[-250:]}"))
    # Where not even the model or a library fits, the error names that.
    named = any(name in outcome.err for name in ("record '", "cannot be loaded: ", "failed to map segment", "OpenBLAS"))
    if outcome.code == 1 and name != "calibrate" and not named:
        findings.append(Finding("message", f"does not name the record: {outcome.err.strip()[-250:]}"))
    return about(f"{name}, {room // _MIB} MiB more", findings)


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))
