"""Inputs and files that were damaged: flipped bits, missing and exchanged parts, other numbers in headers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.attack.commands import COMMANDS, References, differences, outputs, turbo, write_inputs
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, about, command, faults, library, library_faults
from esm_turbo import ContextStore, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.calibration import CALIBRATION_FILE
from esm_turbo.files.kinds import SETTINGS_FILE
from esm_turbo.proteins.fasta import read_fasta_strict

Damage = Callable[[random.Random, bytes], bytes]
_HUGE = (-1, 0, 2, 1000, 10**6, 10**8, 2**31, 2**40, 2**63, 10**19)


def flip(rng: random.Random, data: bytes) -> bytes:
    """One to three bits changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_header(rng: random.Random, data: bytes) -> bytes:
    """The same among the first bytes, where formats keep sizes and names."""
    return flip(rng, data[:3000]) + data[3000:]


def truncate(rng: random.Random, data: bytes) -> bytes:
    """The beginning, possibly nothing."""
    return data[: rng.choice((0, 1, 8, rng.randrange(len(data)), len(data) - 1))]


def replace(rng: random.Random, data: bytes) -> bytes:
    """A part missing, there twice, beside random bytes, or zeros as after a power failure."""
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 16, 64, 512, 4096)))
    part = data[start:stop]
    return data[:start] + rng.choice((b"", 2 * part, part + rng.randbytes(40), bytes(len(part)))) + data[stop:]


def join_lines(rng: random.Random, data: bytes) -> bytes:
    """Two lines joined."""
    breaks = [index for index, byte in enumerate(data) if byte == 10]
    if not breaks:
        return replace(rng, data)
    at = rng.choice(breaks)
    return data[:at] + data[at + 1 :]


def swap_lines(rng: random.Random, data: bytes) -> bytes:
    """Two lines exchanged."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return flip(rng, data)
    one, other = rng.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def odd_text(rng: random.Random, data: bytes) -> bytes:
    """Text of another kind inserted at the beginning of a line or anywhere."""
    text = rng.choice(
        (b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\r", b"\r\n\r\n", b">\n", b">\n>\n", b'"', b",,,,", b"=1+1",
         b"\x1b[31m", "Ω".encode(), b"X" * 500, b"-", b"*", b"#\n", b"\t", b"1e400", b"nan")
    )  # fmt: skip
    starts = [0, *(index + 1 for index, byte in enumerate(data) if byte == 10)]
    at = rng.choice((rng.choice(starts), rng.randrange(len(data))))
    return data[:at] + text + data[at:]


def change_header(rng: random.Random, data: bytes) -> bytes:
    """A number or a name of a safetensors header changed, and the header's length with it."""
    if len(data) < 8:
        return flip(rng, data)
    [length] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    entry = rng.choice(list(header))
    if entry == "__metadata__":
        fields = header[entry]
        name = rng.choice(list(fields))
        fields[name] = rng.choice((str(rng.choice(_HUGE)), "", "nan", "{}", "[]", fields[name][:-1], fields[name] * 2))
    else:
        field = rng.choice(("shape", "data_offsets", "dtype", "name"))
        if field == "name":
            header[entry + "s"] = header.pop(entry)
        elif field == "dtype":
            header[entry][field] = rng.choice(("F16", "F32", "BF16", "I8", "U8", "I64", "F64", "BOOL", "Q7"))
        else:
            numbers = header[entry][field] or [0]
            numbers[rng.randrange(len(numbers))] = abs(rng.choice(_HUGE))
            header[entry][field] = numbers
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def change_field(rng: random.Random, data: bytes) -> bytes:
    """A field of a JSON object removed, misspelt, or given a value of another kind."""
    fields = json.loads(data)
    name = rng.choice(list(fields))
    value = fields.pop(name)
    how = rng.choice(("removed", "misspelt", "other kind", "huge"))
    if how == "misspelt":
        at = rng.randrange(len(name))
        fields[name[:at] + name[at + 1 :]] = value
    elif how == "other kind":
        fields[name] = rng.choice(("", [], {}, None, -1, "x" * 1000))
    elif how == "huge" and isinstance(value, int | float):
        fields[name] = rng.choice(_HUGE)
    return json.dumps(fields, indent=2).encode()


BINARY: tuple[Damage, ...] = (flip, flip, flip_header, truncate, replace, replace)
HEADED: tuple[Damage, ...] = (*BINARY, change_header, change_header)
TEXT: tuple[Damage, ...] = (flip, truncate, replace, replace, join_lines, swap_lines, odd_text, odd_text)
FIELDS: tuple[Damage, ...] = (*TEXT, change_field, change_field, change_field)


def _damages(path: Path) -> Sequence[Damage]:
    if path.suffix == ".safetensors":
        return HEADED
    if path.suffix == ".json":
        return FIELDS
    return TEXT if path.suffix in (".tsv", ".csv", ".txt", ".fasta") else BINARY


def damage(rng: random.Random, paths: Sequence[Path], *, exchange: bool = True) -> str:
    """Damage one of some files in place, or exchange two.

    Returns:
        What was done, in words.
    """
    path = rng.choice(paths)
    alike = [other for other in paths if other.suffix == path.suffix and other != path]
    if exchange and alike and rng.random() < 0.2:
        other = rng.choice(alike)
        one, two = path.read_bytes(), other.read_bytes()
        _write(path, two)
        _write(other, one)
        return f"{path.name} exchanged with {other.name}"
    data = path.read_bytes()
    for _ in range(10):
        how = rng.choice(_damages(path))
        changed = how(rng, data) if data else b"?"
        if changed != data and not _same_json(path, changed, data):
            break
    _write(path, changed)
    return f"{path.name}, {how.__name__}"


def _same_json(path: Path, one: bytes, other: bytes) -> bool:
    """True if two contents of a JSON file differ in spaces alone, which is no damage."""
    try:
        return path.suffix == ".json" and json.loads(one) == json.loads(other)
    except ValueError:
        return False


def _write(path: Path, data: bytes) -> None:
    # A new file: the old one may be a link to a shared one.
    path.unlink()
    path.write_bytes(data)


def _run_damaged(folder: Path, command_line: Sequence[str], changed: Callable[[], list[Finding]]) -> list[Finding]:
    """A command on damaged files either is refused with exit code 2 or results in what it should."""
    outcome = command(folder, command_line)
    findings = faults(outcome)
    if outcome.code == 0:
        findings += changed()
    elif outcome.code == 1:
        findings.append(Finding("exit", f"exit code 1: {outcome.err.strip()[-250:]}"))
    return findings


def damage_text(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """FASTA and CSV files: whatever they hold, records are used or listed, or the file is refused."""
    name = rng.choice(("embed pt", "store", "score", "variants", "generate", "calibrate"))
    write_inputs(folder)
    files = {"score": ["proteins.fasta", "peptides.csv"], "variants": ["wild_type.fasta", "variants.csv"]}
    done = damage(rng, [folder / file for file in files.get(name, ["proteins.fasta"])], exchange=False)
    outcome = command(folder, COMMANDS[name])
    findings = faults(outcome)
    if outcome.code == 2 and (left := sorted(outputs(folder))):
        findings.append(Finding("left behind", f"after exit code 2: {', '.join(left[:3])}"))
    if outcome.code == 1 and ", record " not in outcome.err and ", line " not in outcome.err:
        findings.append(Finding("message", f"names no record: {outcome.err.strip()[-200:]}"))
    return about(f"{name}, {done}", findings)


def damage_results(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Finished outputs that are damaged before the same command runs again: it mends or refuses them."""
    name = rng.choice(("embed pt", "embed safetensors", "embed h5", "store"))
    shutil.copytree(references.folder(name), folder)
    written = [folder / path for path in references.files(name) if not path.endswith(".lock")]
    done = damage(rng, written)
    return about(f"{name}, {done}", _run_damaged(folder, COMMANDS[name], lambda: _compared(folder, references, name)))


def _compared(folder: Path, references: References, name: str) -> list[Finding]:
    found, expected = _without_device(outputs(folder)), _without_device(references.files(name))
    if name == "store":
        # Counts of damaged contexts.
        found.pop("out/usage.jsonl", None)
    return differences(found, expected, mended=True)


def _without_device(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files without the device that settings name, which decides nothing: the first run's stays."""
    kept = dict(files)
    with contextlib.suppress(KeyError, ValueError):
        settings = json.loads(files[f"out/{SETTINGS_FILE}"])
        settings.pop("device", None)
        kept[f"out/{SETTINGS_FILE}"] = json.dumps(settings).encode()
    return kept


def damage_calibration(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """A damaged calibration is refused, or makes no difference."""
    calibration = folder.parent / f"{folder.name}.safetensors"
    shutil.copyfile(EMBEDDED_MODEL / CALIBRATION_FILE, calibration)
    done = damage(rng, [calibration])
    return about(done, _variants_with(folder, references, "--calibration", calibration))


def damage_model(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """A damaged model folder is refused, or makes no difference; of weights, only the header is changed or cut."""
    # Of the same name, which results tell.
    model = folder.parent / f"{folder.name}-model" / EMBEDDED_MODEL.name
    model.mkdir(parents=True)
    for source in EMBEDDED_MODEL.iterdir():
        if source.is_file():
            os.symlink(source, model / source.name)
    file = rng.choice(
        ("config.json", "config.json", "vocab.txt", "vocab.txt", "tokenizer_config.json", "model.safetensors")
    )
    path = model / file
    if file == "model.safetensors":
        how = rng.choice((flip_header, truncate, change_header))
        _write(path, how(rng, path.read_bytes()))
        done = f"{file}, {how.__name__}"
    else:
        done = damage(rng, [path])
    return about(done, _variants_with(folder, references, "--model", model))


def _variants_with(folder: Path, references: References, option: str, path: Path) -> list[Finding]:
    """Scores of variants with a damaged artifact, of which JSON names another path: CSV files are compared."""

    def changed() -> list[Finding]:
        files = outputs(folder), references.files("variants")
        return differences(*({name: data for name, data in x.items() if ".json" not in name} for x in files))

    write_inputs(folder)
    return _run_damaged(folder, [*COMMANDS["variants"], option, str(path)], changed)


def damage_cache(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """A damaged cache file is refused, or holds what was saved."""
    folder.mkdir()
    path, logits = folder / "cache.safetensors", folder / "logits.pt"
    turbo()

    def save() -> int:
        cache = turbo().prefill(["MKTAYIAKQRQISFVKSHF", "GSGSPLLKRR"])
        cache.save(path)
        torch.save(turbo().extend(cache, ["WKD"] * 2).logits, logits)
        return 0

    if library(folder, save).code:
        return [Finding("trial failed", "a cache could not be saved undisturbed")]
    done = damage(rng, [path])

    def load() -> int:
        found = turbo().extend(TurboKVCache.load(path, model=turbo().model), ["WKD"] * 2).logits
        return 0 if torch.equal(found, torch.load(logits)) else OTHER_NUMBERS

    return about(done, library_faults(library(folder, load)))


def damage_store(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """A damaged file of a store is mended or refused when a context is read."""
    shutil.copytree(references.folder("store"), folder)
    done = damage(rng, [folder / path for path in references.files("store") if not path.endswith(".lock")])
    shutil.copytree(references.folder("store") / "out", folder / "whole")
    proteins = tuple(record.sequence for record in read_fasta_strict(folder / "proteins.fasta"))
    turbo()

    def read() -> int:
        expected = _stored_logits(folder / "whole", proteins)
        found = _stored_logits(folder / "out", proteins)
        same = all(one is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        return 0 if same else OTHER_NUMBERS

    return about(done, library_faults(library(folder, read)))


def _stored_logits(folder: Path, proteins: tuple[str, ...]) -> list[torch.Tensor | None]:
    """Logits after each context of a store that has it."""
    with ContextStore(folder) as store:
        caches = store.get(turbo(), proteins)
    return [None if cache is None else turbo().extend(cache, "WKD").logits for cache in caches]
