"""Shards: runs that each take a part of one input, write it to a file or folder of their own, and say what they did.

The shards of `scores.csv` lie in the folder `scores.csv.shards`:

    shard-00003-of-00016.csv            the output of a shard, as any output of its command
    _shard-00003-of-00016.results.json  of a table, the results that it shows, which `merge` joins
    _shard-00003-of-00016.json          its manifest, written last: a shard without one is not done

These names begin with an underscore, so that a folder of Parquet files is read as one table.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from esm_turbo.files.text_files import NO_SUCH_FILE
from esm_turbo.files.writing import LOCK_FILE, file_errors, replacing
from esm_turbo.proteins.fasta import BadRecord, sha256_file
from esm_turbo.tasks.common.pieces import Shard

FORMAT_VERSION = 4
SUFFIX = ".shards"

Kind = Literal["table", "embeddings", "HDF5", "Parquet", "contexts"]
"""What shards are joined into: a table, a folder of embeddings or one file of them, or a store."""

_MANIFEST = re.compile(r"_shard-(\d+)-of-(\d+)\.json")
_DIVISION = "another division of the input"
# Of a store: counts of look-ups, which its use changes.
_UNCHECKED = {LOCK_FILE, "usage.jsonl"}


class ShardError(ValueError):
    """Shards do not belong together, or one is missing or damaged; the message names it."""


@dataclass(frozen=True)
class Manifest:
    """The record of a finished shard.

    Attributes:
        shard: its number, and of how many.
        command: that ran, such as `score`.
        kind: of the output.
        inputs: SHA-256 of every input, by name; from the second of one name on, with its number.
        settings: everything that determines its results, JSON values; the model's weights by their hash.
        run: what it used, see `RunInfo`.
        plan: hash over all pieces and their division, see `Plan`.
        order: of embeddings, the number in the input of every protein.
        failed: records that failed, with the reasons.
        files: size in bytes and SHA-256 of every file, by path.
        versions: of the packages.
    """

    shard: Shard
    command: str
    kind: Kind
    inputs: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    plan: str = ""
    order: list[int] = field(default_factory=list)
    failed: list[list[str]] = field(default_factory=list)
    files: dict[str, list[Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            ShardError: it is damaged, of another shard, or of another format version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            digest = content.pop("sha256")
            if digest != _digest(content):
                raise ValueError("the content does not match its checksum")
            if content.pop("format_version") != FORMAT_VERSION:
                raise ValueError("of another format version")
            manifest = cls(**content | {"shard": Shard(*content["shard"])})
            if path.name != manifest_name(manifest.shard):
                raise ValueError(f"the manifest of shard {manifest.shard}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ShardError(f"{path}: damaged ({error}); remove it and run the shard again") from error
        return manifest

    def write(self, path: Path) -> None:
        """Write the manifest, atomically."""
        content = as_json({"format_version": FORMAT_VERSION, **asdict(self)})
        with replacing(path, inside=True) as temporary:
            temporary.write_text(json.dumps(content | {"sha256": _digest(content)}) + "\n", encoding="utf-8")

    def difference(self, other: Manifest) -> str | None:
        """The first thing in which another shard's run differs, such as `refresh 8, not 4`; None if nothing does."""
        ours, theirs = self.settings, other.settings
        if self.command != other.command:
            return f"command {self.command}, not {other.command}"
        if self.shard.of != other.shard.of:
            return f"one of {self.shard.of} shards, not of {other.shard.of}"
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                what = "another model: weights" if name == "weights" else name
                return f"{what} {ours.get(name)}, not {theirs.get(name)}"
        for name in dict.fromkeys([*self.inputs, *other.inputs]):
            if self.inputs.get(name) != other.inputs.get(name):
                return f"another content of {name}"
        # Before a shard is done, its plan is not known; it follows from the rest.
        if self.plan and other.plan and self.plan != other.plan:
            return _DIVISION
        return None


def shards_folder(out: str | os.PathLike[str]) -> Path:
    """Folder of the shards of an output."""
    out = Path(out)
    return out.with_name(out.name + SUFFIX)


def shard_output(out: str | os.PathLike[str], shard: Shard, kind: Kind = "table") -> Path:
    """The path that a shard writes: for tables a file with the suffix of the output, and else a folder."""
    return shards_folder(out) / (_stem(shard) + (Path(out).suffix if kind == "table" else ""))


def manifest_name(shard: Shard) -> str:
    """File name of a shard's manifest."""
    return f"_{_stem(shard)}.json"


def _stem(shard: Shard) -> str:
    return f"shard-{shard.number:05}-of-{shard.of:05}"


def results_file(out: str | os.PathLike[str], shard: Shard) -> Path:
    """The file of the results that the table of a shard shows."""
    return shards_folder(out) / f"_{_stem(shard)}.results.json"


def is_done(out: str | os.PathLike[str], manifest: Manifest) -> bool:
    """True if a shard was done earlier, with the same settings, and its files are undamaged.

    Args:
        out: the output of all shards.
        manifest: of the shard that is to be done, before its files are known.

    Raises:
        ShardError: it was done with other settings or another input.
    """
    path = shards_folder(out) / manifest_name(manifest.shard)
    if not path.exists():
        return False
    try:
        existing = Manifest.read(path)
    except ShardError:
        return False
    difference = existing.difference(manifest)
    if difference is not None:
        raise ShardError(
            f"{path.parent}: shard {manifest.shard} was made with {difference}; give another output, or the same"
            " options"
        )
    return not damage(path.parent, existing)


def finish_shard(out: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write a shard's manifest, with hashes of all its files: from now on, it counts as done."""
    folder = shards_folder(out)
    path = folder / manifest_name(manifest.shard)
    with file_errors(path):
        for output in (shard_output(out, manifest.shard, manifest.kind), results_file(out, manifest.shard)):
            manifest.files.update(hashes(folder, output))
        manifest.write(path)


def hashes(folder: Path, output: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of a file, or of every file in a folder, by path in `folder`; a shard may have written none."""
    paths = [output] if output.is_file() else sorted(output.rglob("*")) if output.is_dir() else []
    found: dict[str, list[Any]] = {}
    for path in paths:
        if path.is_file() and path.name not in _UNCHECKED:
            found[path.relative_to(folder).as_posix()] = [path.stat().st_size, sha256_file(path)]
    return found


def damage(folder: Path, manifest: Manifest) -> list[str]:
    """Files of a shard that are missing or damaged."""
    bad = []
    for name, expected in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            bad.append(f"{path}: is missing")
        elif hashes(folder, path)[name] != expected:
            bad.append(f"{path}: was altered")
    return bad


@dataclass(frozen=True)
class ShardsState:
    """The state of a run in shards.

    Attributes:
        of: number of shards; 0 if there is none yet.
        manifests: of those that are done, by number.
        missing: numbers of those that are not.
        problems: what is damaged, or does not belong together; each names a shard or a file.
    """

    of: int
    manifests: dict[int, Manifest]
    missing: list[int]
    problems: list[str]

    @property
    def is_complete(self) -> bool:
        """True if the shards can be merged."""
        return bool(self.of) and not self.missing and not self.problems

    @property
    def failed(self) -> list[BadRecord]:
        """Records that failed in any shard, each once."""
        every = (
            BadRecord(record, reason)
            for _, manifest in sorted(self.manifests.items())
            for record, reason in manifest.failed
        )
        return list(dict.fromkeys(every))


def shards_state(out: str | os.PathLike[str]) -> ShardsState:
    """Find out which shards of an output are done, and check their files.

    Raises:
        ShardError: there is no folder of shards.
    """
    folder = shards_folder(out)
    if not folder.is_dir():
        raise ShardError(f"{folder}: no such folder of shards; run a command with --shard first")
    manifests: dict[tuple[int, int], Manifest] = {}
    problems = []
    for path in sorted(folder.iterdir()):
        found = _MANIFEST.fullmatch(path.name)
        if found is None:
            continue
        try:
            manifest = Manifest.read(path)
        except ShardError as error:
            problems.append(str(error))
            continue
        manifests[manifest.shard] = manifest
        problems += [f"shard {manifest.shard}: {text}" for text in damage(folder, manifest)]
    if not manifests:
        return ShardsState(0, {}, [], problems)
    # The majority settings are the reference.
    ordered = [manifests[key] for key in sorted(manifests)]
    kinds = [_digest([one.command, one.shard.of, one.settings, one.inputs, one.plan]) for one in ordered]
    first = ordered[kinds.index(Counter(kinds).most_common(1)[0][0])]
    done: dict[int, Manifest] = {}
    for manifest in ordered:
        difference = manifest.difference(first)
        if difference is not None:
            problem = f"shard {manifest.shard} is of {difference} as shard {first.shard}"
            if difference == _DIVISION:
                # Both count as done: to run them again is not enough.
                names = " or ".join(manifest_name(one.shard) for one in (first, manifest))
                problem += f": remove {names}, whichever another version of esm_turbo made, and run that shard again"
            problems.append(problem)
            continue
        done[manifest.shard.number] = manifest
    missing = [number for number in range(1, first.shard.of + 1) if number not in done]
    return ShardsState(first.shard.of, done, missing, problems)


def input_digests(inputs: Iterable[str | os.PathLike[str] | None]) -> dict[str, str]:
    """SHA-256 of every input of a shard by name; from the second of one name on, with its number.

    Args:
        inputs: paths; None stands for one that was not given.

    Raises:
        ValueError: an input is not there, or not a file, and so has no hash that others could compare.
    """
    digests: dict[str, str] = {}
    names: Counter[str] = Counter()
    for path in (Path(one) for one in inputs if one is not None):
        if not path.exists():
            raise ValueError(f"{path}: {NO_SUCH_FILE}")
        if not path.is_file():
            raise ValueError(f"{path}: is no file; with --shard, each input must be one that all shards read")
        names[path.name] += 1
        digests[path.name if names[path.name] == 1 else f"{path.name} ({names[path.name]})"] = sha256_file(path)
    return digests


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are when JSON of them is read."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return plain


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
