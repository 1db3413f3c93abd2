"""Runs jobs, each killed (SIGKILL) at one of its writes: `python killed_runs.py MODEL JOBS`.

The libraries are loaded once, and every run is a fork. JOBS is a JSON list of `{"job", "out", "kill_at", "when", ...}`.
`kill_at` counts renames of finished files, appends to an index and results that are kept. `when` is the moment of that
write at which the process dies: `before`, `after`, or `half`, with part of it in the file. Each run's exit code is
printed on a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from esm_turbo import TurboEsm
from esm_turbo.files import artifacts
from esm_turbo.files.journal import Journal, journal_beside
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.common import pieces
from esm_turbo.tasks.embedding import index
from esm_turbo.tasks.embedding.records import embed_records
from esm_turbo.tasks.embedding.request import EmbeddingRequest
from esm_turbo.tasks.scoring import records as scoring
from esm_turbo.tasks.variants import records as variants


class DyingWrites:
    """Replaces the functions that complete a write, and kills the process at one of them."""

    def __init__(self, kill_at: int, when: str) -> None:
        self.kill_at = kill_at
        self.when = when
        self.count = 0

    def install(self) -> None:
        rename, append = os.replace, index._append

        def dying_rename(source: Any, target: Any) -> None:
            if self._is_it():
                if self.when == "half":
                    os.truncate(source, os.path.getsize(source) // 2)
                if self.when == "after":
                    rename(source, target)
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        def dying_append(path: Path, size: int, content: bytes) -> int:
            if self._is_it():
                if self.when != "before":
                    append(path, size, content[:5] if self.when == "half" else content)
                os.kill(os.getpid(), signal.SIGKILL)
            return append(path, size, content)

        add = Journal.add

        def dying_add(journal: Journal, key: str, value: Any) -> None:
            if self._is_it():
                before = journal._path.stat().st_size if journal._path.exists() else 0
                if self.when != "before":
                    add(journal, key, value)
                if self.when == "half":
                    os.truncate(journal._path, (before + journal._path.stat().st_size) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            add(journal, key, value)

        artifacts.os.replace = dying_rename  # type: ignore[attr-defined]
        index._append = dying_append
        Journal.add = dying_add  # type: ignore[method-assign]

    def _is_it(self) -> bool:
        self.count += 1
        return self.count == self.kill_at


def run_embed(turbo: TurboEsm, job: dict[str, Any]) -> None:
    records = [ProteinRecord(name, sequence) for name, sequence in job["records"]]
    request = EmbeddingRequest.of(turbo, job["layers"], job["include"])
    embed_records(turbo, records, job["out"], request, file_format=job["format"], toks_per_batch=job["toks_per_batch"])


def run_store(turbo: TurboEsm, job: dict[str, Any]) -> None:
    from esm_turbo import ContextStore
    from esm_turbo.store import filling

    # As on a GPU, where a batch is computed while the one before is written.
    filling._writers = lambda _: job["writers"]  # type: ignore[assignment]
    with ContextStore(job["out"]) as store:
        store.add(turbo, [sequence for _, sequence in job["records"]], toks_per_batch=job["toks_per_batch"])


def run_score(turbo: TurboEsm, job: dict[str, Any]) -> None:
    """A candidate on every record, in pieces of one target."""
    targets = [ProteinRecord(name, sequence) for name, sequence in job["records"]]
    candidates = [scoring.Candidate("a", "ACDEF")]
    with journal_beside(Path(job["out"])) as journal:
        pieces.TOKENS_PER_PIECE = 1
        run = scoring.score_records(turbo, targets, candidates, ["frozen"], journal=journal)
        _write(run, job, journal)


def run_variants(turbo: TurboEsm, job: dict[str, Any]) -> None:
    """All single substitutions of every record, in pieces of one protein."""
    proteins = [ProteinRecord(name, sequence) for name, sequence in job["records"]]
    with journal_beside(Path(job["out"])) as journal:
        # The smallest piece has a 32th: the 90 tokens of a record, and a few more.
        pieces.TOKENS_PER_PIECE = 32 * 95
        run = variants.score_records(turbo, proteins, None, ["frozen"], journal=journal)
        _write(run, job, journal)


def _write(run: scoring.ScoringRun | variants.VariantsRun, job: dict[str, Any], journal: Journal | None) -> None:
    """Writes a table as commands do, and how many results an earlier run had kept."""
    assert journal is not None
    run.write(job["out"])
    journal.remove()
    Path(job["out"] + ".found").write_text(str(journal.found), encoding="utf-8")


JOBS = {"embed": run_embed, "store": run_store, "score": run_score, "variants": run_variants}


def killed_runs(model: str | Path, jobs: Sequence[dict[str, Any]], folder: Path) -> list[int]:
    """Run jobs, of which each is killed at its write, and return their exit codes."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, __file__, model, path],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def main() -> None:
    torch.set_num_threads(1)
    model, jobs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    turbo = TurboEsm.from_pretrained(model, preset="exact", device="cpu")
    for job in jobs:
        child = os.fork()
        if child == 0:
            DyingWrites(job["kill_at"], job["when"]).install()
            JOBS[job["job"]](turbo, job)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
