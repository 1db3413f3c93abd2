"""Ctrl-C and SIGTERM at any moment of a process: one line, and exit code 130 or 143."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esm_turbo.files.writing import is_temporary

ROOT = str(Path(__file__).parents[2])

# Sends the interrupt when the import of a module begins, or where a statement stands in the place of the command.
CODE = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from esm_turbo.cli.app import main
main(sys.argv[2:])
"""


def run(code, *arguments):
    # The background jobs of a shell ignore interrupts.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "module",
    [
        "esm_turbo.cli.commands",
        "cyclopts",
        "rich.console",
        "esm_turbo.cli.console",
        "esm_turbo.cli.inputs",
        "numpy",
        "torch",
        "torch.nn",
        "transformers",
        "esm_turbo.kv_cache",
        "transformers.models.esm.modeling_esm",
    ],
)
def test_during_an_import(module):
    result = run(CODE, module, "info")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "esm-turbo: interrupted\n")


# What libraries make of an interrupt.
@pytest.mark.parametrize(
    "body",
    [
        "signal.raise_signal(signal.SIGINT)",
        # C extensions report any failed import as an ImportError.
        "try:\n        signal.raise_signal(signal.SIGINT)\n    except BaseException:\n        raise ImportError",
        # Python drops exceptions in destructors.
        "class Lost:\n        def __del__(self):\n            signal.raise_signal(signal.SIGINT)\n"
        "    Lost()\n    time.sleep(30)",
        # While what was dropped before is shown.
        "class Lost:\n        def __del__(self):\n            raise ValueError\n"
        "    sys.__unraisablehook__ = lambda _: signal.raise_signal(signal.SIGINT)\n    Lost()\n    time.sleep(30)",
        # Pressed again while the first one is cleaned up.
        "try:\n        signal.raise_signal(signal.SIGINT)\n    finally:\n        signal.raise_signal(signal.SIGINT)\n"
        "        time.sleep(30)",
    ],
    ids=["plain", "converted", "lost", "lost again", "twice"],
)
def test_during_a_command(body):
    began = time.monotonic()
    result = run(
        f"""
import signal, sys, time
from esm_turbo.cli import app, commands
def interrupted(*_, **__):
    {body}
commands.app = interrupted
app.main(["info"])
"""
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "esm-turbo: interrupted\n")
    assert time.monotonic() - began < 25


def test_after_the_results_nothing_is_disturbed():
    result = run(
        """
import atexit, signal
from esm_turbo.cli import app, commands
atexit.register(signal.raise_signal, signal.SIGINT)
commands.app = lambda *_, **__: 0
app.main([])
"""
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_other_dropped_exceptions_are_still_shown():
    result = run(
        """
from esm_turbo.cli import app, commands
class Broken:
    def __del__(self):
        raise RuntimeError("dropped")
def command(*_, **__):
    Broken()
    return 0
commands.app = command
app.main([])
"""
    )
    assert result.returncode == 0
    assert "RuntimeError: dropped" in result.stderr


def test_a_job_in_the_background_goes_on(tmp_path):
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from esm_turbo.cli import app, commands
commands.app = lambda *_, **__: signal.raise_signal(signal.SIGINT)
app.main([])
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


WORDS = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}


@pytest.mark.parametrize("command", ["embed", "embed one file", "store"])
def test_a_run_says_that_nothing_is_kept_yet(tmp_path, command):
    """The signal comes before the first piece."""
    fasta = tmp_path / "proteins.fasta"
    fasta.write_text(">p\nMKTAYIAKQR\n")
    out = tmp_path / ("out.h5" if command == "embed one file" else "out")
    result = run(
        """
import signal, sys
from esm_turbo import ContextStore
from esm_turbo.cli.app import main
from esm_turbo.tasks.common.pieces import InProcessRunner
InProcessRunner.run = ContextStore.add = lambda *_, **__: signal.raise_signal(signal.SIGINT)
main(sys.argv[1:])
""",
        *(command.split()[0], str(fasta), str(out)),
    )
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1] == "esm-turbo: interrupted before any result was kept"


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["alone", "workers"])
@pytest.mark.parametrize("number", WORDS)
def test_a_run_says_that_it_continues_and_leaves_no_process(tmp_path, number, workers):
    """The signal comes when the first piece is done."""
    fasta, out = tmp_path / "proteins.fasta", tmp_path / "out"
    fasta.write_text("".join(f">p{n}\n{'MKTAYIAKQRQISFVKSHFS'[: n + 8]}\n" for n in range(8)))
    code = f"""
if __name__ == "__main__":
    import multiprocessing, signal, threading
    from esm_turbo.cli.app import main
    from esm_turbo.tasks.common.progress import StageProgress

    advance = StageProgress.advance

    def advance_once(progress, units):
        advance(progress, units)
        if units:
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            signal.raise_signal(signal.{number})

    StageProgress.advance = advance_once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may ignore either
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(["embed", {str(fasta)!r}, {str(out)!r}, "--toks-per-batch", "20", "--include", "mean", *{workers!r}])
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": ROOT}
    )
    exit_code, word = WORDS[number]
    assert result.returncode == exit_code
    assert result.stderr.splitlines()[-1] == f"esm-turbo: {word}; the same command continues where it was"
    children = [int(pid) for pid in result.stdout.split()]
    assert len(children) == (2 if workers else 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not [path.name for path in out.iterdir() if is_temporary(path.name)]
    again = subprocess.run(
        [sys.executable, "-m", "esm_turbo", "embed", fasta, out, "--toks-per-batch", "20", "--include", "mean"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    assert again.returncode == 0 and "8 of 8 proteins embedded" in again.stdout and "earlier" in again.stdout
