"""A process that compiles kernels for another one, which sends it one variant after the other.

Run by `ops.compilation` as `python -m esm_turbo.ops.compile_worker`. Requests and replies are pickles, on standard
input and output; a reply is None, or the reason why a kernel does not compile.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, BinaryIO

from esm_turbo.ops.variants import Variant


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Compiles variants until there are no more requests."""
    while True:
        try:
            variant: Variant = pickle.load(requests)
        except EOFError:
            return
        try:
            _compile_launcher(variant.compile())
            reply = None
        except Exception as error:
            reply = str(error)
        pickle.dump(reply, replies)
        replies.flush()


def _compile_launcher(compiled: Any) -> None:
    """Compiles the C function that launches a kernel, which older versions of Triton make for each signature."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    # What others print must not get between the replies.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, output)
