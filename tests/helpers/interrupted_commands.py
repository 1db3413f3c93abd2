"""Run commands that a signal hits while they write an artifact: `python interrupted_commands.py JOBS`.

The libraries are loaded once; every command is a fork. JOBS is JSON: a list of `{"signal", "arguments"}`. One line per
command gives its exit code, negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from esm_turbo import TurboEsm
from esm_turbo.cli import app
from esm_turbo.cli.console import quiet_transformers
from esm_turbo.files import artifacts


def signal_in_save(number: int) -> None:
    """Send this process a signal when half of an artifact is written."""
    save_file = artifacts.save_file

    def half_written(tensors: Any, path: Path, metadata: Any = None) -> None:
        save_file(tensors, path, metadata=metadata)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), number)
        time.sleep(60)

    artifacts.save_file = half_written


def main() -> None:
    torch.set_num_threads(1)
    # Loads all libraries, once for all forks.
    quiet_transformers()
    TurboEsm.from_pretrained(calibration=False, device="cpu")
    # The background jobs of a shell ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python 3.12 and newer warn of forks beside other threads; the children run none of those.
    warnings.simplefilter("ignore", DeprecationWarning)
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        child = os.fork()
        if child == 0:
            signal_in_save(job["signal"])
            os._exit(app.run(job["arguments"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
