"""Runs over several processes whose workers, shards, actors or drivers are killed at random moments.

Each ends, or is run again, with the outputs of one undisturbed process: no record lost, doubled or different.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.attack.commands import Files, differences, outputs, write_inputs
from benchmarks.attack.trial import Finding, Outcome, command, start_command
from esm_turbo.tasks.common.progress import StageProgress

_FASTA = "proteins.fasta"
_BATCH = ("--toks-per-batch", "80")
TASKS: dict[str, tuple[str, ...]] = {
    "embed": ("embed", _FASTA, "out", *_BATCH),
    "embed h5": ("embed", _FASTA, "out.h5", *_BATCH),
    "embed parquet": ("embed", _FASTA, "out.parquet", "--include", "mean", *_BATCH),
    "score": ("score", _FASTA, "peptides.csv", "--out", "out.csv", "--top", "0"),
    "variants": ("variants", _FASTA, "--out", "out.parquet"),
    "store": ("store", _FASTA, "out", *_BATCH),
}
"""Commands by name; their output is the path that begins with `out`."""
_SHARDS = 3
# Their number, in eight batches or so, and residues of the longest.
_PROTEINS = 14, 60
# Longest times after which a process is killed, from the start of the run and from its first result, seconds.
_FROM_START, _FROM_FIRST_RESULT = 6.0, 1.0
# That an orphan may take to end: it may just be loading its model.
_ORPHAN_SECONDS = 60.0
# After which a run hangs: on a busy machine, an actor takes a minute to load its libraries, and is killed twice.
_SECONDS = 600.0
# Counts of look-ups, which depend on who looks.
_UNCOMPARED = "usage.jsonl"


@dataclass
class Trial:
    """The result of one trial.

    Attributes:
        kills: processes that were killed.
        findings: what must not happen.
    """

    kills: int = 0
    findings: list[Finding] = field(default_factory=list)

    def check(self, ended: Outcome, run: str) -> None:
        """Note a run that did not end well."""
        if ended.hung:
            self.findings.append(Finding("hang", f"{run} did not end"))
        elif ended.code:
            self.findings.append(Finding("exit", f"{run} ended with {ended.code}: {ended.err.strip()[-300:]}"))


@dataclass(frozen=True)
class Moment:
    """When a process is killed: a time after the pieces are handed out, or after the first result."""

    after_first: bool
    seconds: float

    @classmethod
    def draw(cls, rng: random.Random) -> Moment:
        """A random moment."""
        after_first = rng.random() < 0.7
        return cls(after_first, rng.uniform(0, _FROM_FIRST_RESULT if after_first else _FROM_START))


class Killer:
    """Kills processes from within the process that starts a run.

    Args:
        moments: when.
        victims: finds the processes that may be killed; None is this process itself.
        log: a file that has a line for every process that was killed.
        seed: of the choice among victims.
    """

    def __init__(self, moments: Sequence[Moment], victims: Callable[[], list[int]] | None, log: Path, seed: str):
        self._moments, self._victims, self._log = moments, victims, log
        self._random = random.Random(seed)

    def install(self) -> None:
        """Wait for the run to begin, for the rest of the process."""
        advance = StageProgress.advance
        seen: set[bool] = set()

        def once(after_first: bool) -> None:
            if after_first not in seen:
                seen.add(after_first)
                for moment in self._moments:
                    if moment.after_first == after_first:
                        timer = threading.Timer(moment.seconds, self._strike)
                        timer.daemon = True
                        timer.start()

        def advance_once(progress: StageProgress, units: int) -> None:
            advance(progress, units)
            once(units > 0)

        StageProgress.advance = advance_once  # type: ignore[method-assign]

    def _strike(self) -> None:
        children = local_workers(os.getpid())
        found = [os.getpid()] if self._victims is None else self._victims()
        if not found:
            return
        victim = self._random.choice(found)
        with self._log.open("a") as file:
            file.write(" ".join(map(str, [victim, *(children if victim == os.getpid() else ())])) + "\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


class Cluster:
    """A Ray of this machine, in processes of its own.

    Attributes:
        address: of the cluster.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        # Trials have a home of their own, where no token lies.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        program = Path(sys.executable).parent / "ray"
        options = ["--head", "--block", "--port", str(port), "--num-cpus", "3", "--include-dashboard=false"]
        with (folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [program, "start", *options, "--temp-dir", str(folder), "--object-store-memory", "100000000"],
                stdout=log,
                stderr=log,
                # Ray's processes would only have the time that others leave.
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
            )
        if not _wait(lambda: any("raylet" in _line(pid) for pid in _descendants(self._process.pid)), 60):
            raise RuntimeError(f"no Ray: {(folder / 'log.txt').read_text()[-500:]}")

    def actors(self) -> list[int]:
        """The processes that run pieces, or load the model for it."""
        return [pid for pid in _descendants(self._process.pid) if "ray::PieceWorker" in _line(pid)]

    def close(self) -> None:
        """End the cluster."""
        self._process.terminate()
        self._process.wait(60)


@functools.cache
def undisturbed(root: Path, task: str) -> Files:
    """The outputs of a task by one process."""
    folder = root / task.replace(" ", "-")
    write_inputs(folder, *_PROTEINS)
    ended = command(folder, TASKS[task], seconds=_SECONDS)
    if ended.code:
        raise RuntimeError(f"esm-turbo {' '.join(TASKS[task])} failed undisturbed: {ended.err.strip()}")
    return _outputs(folder)


def _outputs(folder: Path) -> Files:
    return {name: data for name, data in outputs(folder).items() if Path(name).name != _UNCOMPARED}


def shards(rng: random.Random, folder: Path, task: str, cluster: Cluster | None) -> Trial:
    """Kills shards, runs them again, and joins them; some run at the same time."""
    trial = Trial()
    for number in rng.sample(range(1, _SHARDS + 1), _SHARDS):
        arguments = (*TASKS[task], "--shard", f"{number}/{_SHARDS}")
        for _ in range(rng.choice((0, 1, 1, 2))):
            running = start_command(folder, arguments)
            # Loading the model takes as long as the work of a shard.
            time.sleep(rng.uniform(0, 1.5))
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
            trial.kills += running.wait(_SECONDS).code < 0
        trial.check(command(folder, arguments, seconds=_SECONDS), f"shard {number} after the kills")
    [out] = [name for name in TASKS[task] if name.startswith("out")]
    trial.check(command(folder, ("merge", out), seconds=_SECONDS), "merge")
    shutil.rmtree(folder / f"{out}.shards", ignore_errors=True)
    return trial


def workers(rng: random.Random, folder: Path, task: str, cluster: Cluster | None) -> Trial:
    """Kills one or two workers, or actors of a cluster; the run goes on."""
    log = folder.with_name("killed.txt")
    log.unlink(missing_ok=True)
    victims = (lambda: local_workers(os.getpid())) if cluster is None else cluster.actors
    # Three deaths of one piece would make its records fail, as is promised.
    killer = Killer([Moment.draw(rng) for _ in range(rng.choice((1, 2, 2)))], victims, log, str(rng.random()))
    trial = Trial()
    ended = command(folder, _in_parallel(task, cluster), killer.install, _SECONDS)
    trial.check(ended, "the run whose workers were killed")
    trial.kills = len(_killed(log))
    return trial


def driver(rng: random.Random, folder: Path, task: str, cluster: Cluster | None) -> Trial:
    """Kills the process that started a run, and runs it again; its workers end by themselves."""
    log = folder.with_name("killed.txt")
    log.unlink(missing_ok=True)
    trial, arguments = Trial(), _in_parallel(task, cluster)
    for _ in range(rng.choice((1, 1, 2))):
        killer = Killer([Moment.draw(rng)], None, log, str(rng.random()))
        if command(folder, arguments, killer.install, _SECONDS).code >= 0:
            break
    trial.kills = len(_killed(log))
    trial.check(command(folder, arguments, seconds=_SECONDS), "the run after the driver's death")
    orphans = [pid for line in _killed(log) for pid in line[1:]]
    if not _wait(lambda: not any("spawn_main" in _line(pid) for pid in orphans), _ORPHAN_SECONDS):
        trial.findings.append(Finding("left running", "a worker whose driver was killed"))
    return trial


def _in_parallel(task: str, cluster: Cluster | None) -> tuple[str, ...]:
    """The command of a task with two workers, of a cluster if there is one."""
    on_ray = () if cluster is None else ("--engine", "ray", "--address", cluster.address)
    return (*TASKS[task], "--workers", "2", *on_ray)


ENGINES: dict[str, Callable[[random.Random, Path, str, Cluster | None], Trial]] = {
    "workers": workers,
    "driver": driver,
    "shards": shards,
    "ray actors": workers,
    "ray driver": driver,
}
"""The processes that are killed, by name; only those of Ray have a cluster."""


def run_trial(engine: str, task: str, seed: str, root: Path, cluster: Cluster | None = None) -> Trial:
    """One trial, and what differs from an undisturbed run.

    Args:
        engine: see `ENGINES`.
        task: see `TASKS`.
        seed: decides the moments.
        root: folder of the undisturbed runs and of the trial's files, which are removed at its end.
        cluster: for the engines on Ray.
    """
    expected = undisturbed(root, task)
    folder = root / "trial"
    write_inputs(folder, *_PROTEINS)
    try:
        trial = ENGINES[engine](random.Random(seed), folder, task, cluster)
        trial.findings += differences(_outputs(folder), expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return trial


def local_workers(parent: int) -> list[int]:
    """The workers of a process, see `esm_turbo.parallel.workers`."""
    return [pid for pid in _children(parent) if "spawn_main" in _line(pid)]


def _killed(log: Path) -> list[list[int]]:
    """For every kill the process, and the workers of a driver."""
    return [[int(pid) for pid in line.split()] for line in log.read_text().splitlines()] if log.exists() else []


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """True if a condition holds before the time is over."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


def _descendants(parent: int) -> Iterator[int]:
    for child in _children(parent):
        yield child
        yield from _descendants(child)


def _children(parent: int) -> list[int]:
    """Child processes, of Linux."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{parent}/task"):
            found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def _line(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
