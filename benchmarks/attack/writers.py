"""Several writers at once: processes with one output or store, threads with one model and one store."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import torch

from benchmarks.attack.commands import COMMANDS, References, differences, outputs, protein, turbo, write_inputs
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, command, faults, library, start_command
from esm_turbo import ContextStore


def processes(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Two or three processes run one command at once: each ends well or says that another one writes.

    Afterwards the same command ends with the files of an undisturbed run.
    """
    name = rng.choice(list(COMMANDS))
    expected = references.files(name)
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
    again = command(folder, COMMANDS[name])
    findings += faults(again)
    if again.code:
        findings.append(Finding("exit", f"the run after them ended with {again.code}: {again.err.strip()[-250:]}"))
    findings += differences(outputs(folder), expected)
    return [Finding(one.category, f"{name}, {len(outcomes)} at once: {one.what}") for one in findings]


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

    outcome = library(folder, run)
    if outcome.code == OTHER_NUMBERS:
        return [Finding("different", f"threads of {', '.join(what for what, _, _ in jobs)}: other numbers than alone")]
    return faults(outcome)
