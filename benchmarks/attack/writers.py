"""Several writers at once: processes with one output or store, threads with one model and one store."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import torch

from benchmarks.attack.commands import COMMANDS, References, protein, run_to_end, turbo, write_inputs
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, about, faults, library, library_faults, start_command
from esm_turbo import ContextStore


def processes(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Two or three processes run one command at once: each ends well or says that another one writes.

    Afterwards the same command ends with the files of an undisturbed run.
    """
    name = rng.choice(list(COMMANDS))
    write_inputs(folder)
    running = []
    for _ in range(rng.choice((2, 2, 3))):
        running.append(start_command(folder, COMMANDS[name]))
        time.sleep(rng.choice((0.0, 0.0, 0.1, 0.3)))
    outcomes = [one.wait() for one in running]
    findings = [fault for outcome in outcomes for fault in faults(outcome)]
    for outcome in outcomes:
        if outcome.code and "another process" not in outcome.err:
            findings.append(Finding("exit", f"exit code {outcome.code}: {outcome.err.strip()[-250:]}"))
    if all(outcome.code for outcome in outcomes):
        findings.append(Finding("exit", "no process did the job"))
    findings += run_to_end(folder, name, references)
    return about(f"{name}, {len(outcomes)} at once", findings)


def threads(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Threads share one model and one store: each gets what it would get alone, bit for bit."""
    folder.mkdir()
    proteins = [protein(rng, 10, 30) for _ in range(3)]
    jobs = [(rng.choice(("extend", "store", "score")), rng.choice(proteins), protein(rng, 2, 5)) for _ in range(8)]

    def run() -> int:
        model = turbo()

        def result(store: ContextStore, what: str, context: str, new: str) -> torch.Tensor:
            if what == "score":
                return torch.tensor([one.pseudo_perplexity for one in model.score(context, [new]).scores])
            cache = model.prefill(context) if what == "extend" else store.get_or_prefill(model, context)
            return model.extend(cache, new).logits

        with ContextStore("alone") as store:
            expected = [result(store, *job) for job in jobs]
        found: dict[int, torch.Tensor] = {}
        with ContextStore("shared") as store:

            def work(numbers: range) -> None:
                for number in numbers:
                    found[number] = result(store, *jobs[number])

            workers = [threading.Thread(target=work, args=(range(first, len(jobs), 4),)) for first in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        same = len(found) == len(jobs) and all(torch.equal(found[i], x) for i, x in enumerate(expected))
        return 0 if same else OTHER_NUMBERS

    return about(f"threads of {', '.join(what for what, _, _ in jobs)}", library_faults(library(folder, run)))
