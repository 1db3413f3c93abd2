"""Ctrl-C at any moment of a process: one line, and exit code 130."""

import subprocess
import sys
import time

import pytest

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
        # Pressed again while the first one is cleaned up.
        "try:\n        signal.raise_signal(signal.SIGINT)\n    finally:\n        signal.raise_signal(signal.SIGINT)\n"
        "        time.sleep(30)",
    ],
    ids=["plain", "converted", "lost", "twice"],
)
def test_during_a_command(body):
    began = time.monotonic()
    result = run(
        f"""
import signal, time
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
