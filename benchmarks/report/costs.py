"""What runs over whole databases cost: measured rates, sizes of databases, and their simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from benchmarks.harness import stored
from benchmarks.report.simulation import Outcome, Work, simulate

_HIDDEN = 1280
_PIECES, _PER_WORKER = 2000, 20
# Spread of the logarithm of protein lengths, so that the mean is 1.3 times the median.
_SPREAD = 0.72
# Of a score or a variant in a table: its identifiers, its sequence and two numbers, as text.
_ROW_BYTES = 80


@dataclass(frozen=True)
class Database:
    """Proteins to run.

    Attributes:
        name: of the set.
        proteins: their number.
        mean: their mean length.
        source: where number and mean are from.
    """

    name: str
    proteins: int
    mean: float
    source: str

    @property
    def residues(self) -> float:
        return self.proteins * self.mean

    def lengths(self, pieces: int) -> list[float]:
        """Lengths of representative proteins, log-normal around the mean; one for each piece, in any order."""
        normal = NormalDist(0, _SPREAD)
        found = [math.exp(normal.inv_cdf((index + 0.5) / pieces)) for index in range(pieces)]
        scale = self.mean * pieces / sum(found)
        return [length * scale for length in found]


SWISS_PROT = Database(
    "Swiss-Prot", 573_661, 362, "UniProt release 2025_03, number from its release notes, mean length from memory"
)
UNIREF50 = Database(
    "UniRef50", 70_198_728, 290, "UniProt release 2025_03, number from its release notes, mean length from memory"
)
HUMAN = Database("human proteome", 20_600, 553, "UniProt's human reference proteome, one protein a gene, from memory")
TARGETS = Database("20,000 human targets", 20_000, 553, HUMAN.source)
PEPTIDES = 1000


@dataclass(frozen=True)
class Rate:
    """A measured figure.

    Attributes:
        value: the figure.
        unit: what it counts.
        what: was measured, by the names of its row.
        file: of the row, in benchmarks/results/.
        record: the row.
    """

    value: float
    unit: str
    what: str
    file: str
    record: stored.Record


def rates() -> dict[str, Rate]:
    """The measured figures of which everything is made, by what they are used for.

    Raises:
        LookupError: one was never measured.
    """
    files = _row("cpu", "means_output", "means of 1280", None)
    reading = _row("gpu", "store_read_cuda", "650M, random weights, 512 residues, cuda")
    seconds, size = reading["figures"]["seconds"], reading["figures"]["bytes"]["file"]
    filled = _row("gpu", "resident_contexts_cuda", "contexts of 512 tokens, turbo2")
    resident = filled["figures"]["bytes"]
    memory = stored.newest("memory", lambda figures: figures["size"])["650M"]
    own = memory["figures"]
    found = {
        "embed": _call("embedding, batches of 16384 tokens", "turbo.embed, mean"),
        "store": _call("embedding, batches of 16384 tokens", "turbo.embed, mean and caches"),
        "score": _call("score 1,000 peptides", "turbo.score, turbo"),
        "variants": _call("score all variants of 500 residues", "turbo.score_variants, turbo"),
        "read a context": Rate(
            size / (seconds["disk"]["p50"] - seconds["host memory"]["p50"]),
            "bytes/s",
            "store_read_cuda, 512 residues: a context from a file in the page cache, with its checks",
            "gpu",
            reading,
        ),
        "device memory": Rate(resident["device"], "bytes", "resident_contexts_cuda: memory of one H200", "gpu", filled),
        "model": Rate(resident["model"], "bytes", "resident_contexts_cuda: weights in bfloat16", "gpu", filled),
    }
    for name, (figure, unit) in {"each": ("each", "s"), "end": ("at the end", "s")}.items():
        value = files["figures"]["seconds"]["parquet"][figure]
        found[f"write a mean, {name}"] = Rate(value, unit, f"means_output, parquet: {figure}", "cpu", files)
    found["bytes of a mean"] = Rate(
        files["figures"]["bytes"]["parquet"], "bytes", "means_output, parquet: file", "cpu", files
    )
    for preset in ("turbo3", "turbo2"):
        value = own["presets"][preset]["bytes"] / own["tokens"]
        found[f"context, {preset}"] = Rate(value, "bytes/token", f"memory, 650M: {preset}", "memory", memory)
    return found


@dataclass(frozen=True)
class Task:
    """A run over a database.

    Attributes:
        name: what is done.
        database: with what.
        piece: the work of a protein of some length.
        ahead: whether a worker computes while it writes.
    """

    name: str
    database: Database
    piece: Callable[[float], Work]
    ahead: bool = False

    def run(self, workers: int, bandwidth: float) -> Outcome:
        """Simulate the run; the most costly pieces are handed out first."""
        pieces = sorted(self.pieces(max(_PIECES, _PER_WORKER * workers)), key=lambda one: -one.compute)
        return simulate(pieces, workers, bandwidth, ahead=self.ahead)

    def pieces(self, most: int = _PIECES) -> Iterator[Work]:
        """Pieces for the simulation: each stands for as many proteins of one length."""
        count = min(most, self.database.proteins)
        times = self.database.proteins / count
        for length in self.database.lengths(count):
            one = self.piece(length)
            yield Work(one.read * times, one.compute * times, one.prepare * times, one.write * times)


def tasks(measured: dict[str, Rate] | None = None) -> list[Task]:
    """The runs of the page."""
    rate = rates() if measured is None else measured

    def embed(length: float) -> Work:
        seconds = _seconds(rate["embed"], length)
        # The table is written at the end, by one process; per protein it is the same.
        prepare = rate["write a mean, each"].value + rate["write a mean, end"].value
        return Work(0, seconds, prepare, rate["bytes of a mean"].value)

    def store(length: float) -> Work:
        return Work(0, _seconds(rate["store"], length), 0.0, rate["context, turbo3"].value * (length + 1))

    def screen(length: float) -> Work:
        # Without a store: the context is computed with its scores.
        return Work(0, PEPTIDES * _seconds(rate["score"], length, per=1), 0.0, PEPTIDES * _ROW_BYTES)

    def screen_stored(length: float) -> Work:
        read = rate["context, turbo3"].value * (length + 1)
        work = screen(length)
        return Work(read, work.compute, read / rate["read a context"].value, work.write)

    def singles(length: float) -> Work:
        return Work(0, _seconds(rate["variants"], length), 0.0, 19 * length * _ROW_BYTES)

    return [
        Task("`embed`, means to Parquet", SWISS_PROT, embed, ahead=True),
        Task("`embed`, means to Parquet", UNIREF50, embed, ahead=True),
        Task("`store`, turbo3", SWISS_PROT, store),
        Task("`store`, turbo3", UNIREF50, store),
        Task("`score`, 1,000 peptides each", TARGETS, screen),
        Task("`score --store`, 1,000 peptides each", TARGETS, screen_stored),
        Task("`variants`, all singles", HUMAN, singles),
    ]


def _seconds(rate: Rate, length: float, per: float | None = None) -> float:
    """Seconds of a protein: the measured rate, and the attention of longer contexts.

    Linear layers cost 6 hidden_size per token where attention costs the context's length, see `forward_cost` in
    esm_turbo/tasks/common/pieces.py.

    Args:
        rate: per second.
        length: of the protein.
        per: what the rate counts in a protein; None for its residues.
    """
    shape = rate.record["figures"]["shape"]
    measured = shape["residues"] / shape["proteins"] if "proteins" in shape else shape["context_tokens"]
    return (length if per is None else per) / rate.value * (6 * _HIDDEN + length) / (6 * _HIDDEN + measured)


def _call(case: str, arm: str) -> Rate:
    record = _row("gpu", "calls_cuda", case)
    figures = record["figures"]
    return Rate(figures["per_second"][arm], f"{figures['unit']}/s", f"calls_cuda, {case}: {arm}", "gpu", record)


def _row(file: str, benchmark: str, case: str, model: str | None = "650M, random weights") -> stored.Record:
    """The newest row of a case."""

    def key(figures: dict[str, Any]) -> bool | None:
        wanted = (figures["benchmark"], figures["case"]) == (benchmark, case)
        return True if wanted and (benchmark != "calls_cuda" or "per_second" in figures) else None

    record = stored.newest("speed", key, file)[True]
    if model is not None and record["model"] != model:
        raise LookupError(f"{file}.jsonl: {case} of {benchmark} is of {record['model']}, not {model}")
    return record
