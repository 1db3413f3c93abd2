"""The command line, `esm-turbo`. Commands import the model libraries when they run, so that `--help` is quick.

Exit codes: 0 success; 1 some records failed, or the job failed; 2 wrong arguments or unusable input, nothing written.
Every error is one line on standard error; `--debug` adds the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from esm_turbo import __version__
from esm_turbo.cli.commands.calibrate import calibrate
from esm_turbo.cli.commands.demo import demo
from esm_turbo.cli.commands.embed import embed
from esm_turbo.cli.commands.evaluate import evaluate
from esm_turbo.cli.commands.generate import generate
from esm_turbo.cli.commands.info import info
from esm_turbo.cli.commands.score import score
from esm_turbo.cli.commands.store import store
from esm_turbo.cli.commands.variants import variants
from esm_turbo.cli.console import quiet, say
from esm_turbo.cli.inputs import with_checked_outputs

app = App(
    name="esm-turbo",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help="A compressed key/value cache for the ESM-2 protein language model.\n\n"
    "`--debug` with any command adds the traceback to an error. Exit codes: 0 success; 1 some records failed, or the"
    " job failed; 2 wrong arguments or unusable input.",
)
for command in (demo, calibrate, embed, generate, store, evaluate, score, variants, info):
    app.command(with_checked_outputs(command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: without the program's name.
    """
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with quiet(debug):
            code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _fail(130, "interrupted", debug)
    except BrokenPipeError:
        # The reader is gone, as in `| head`; the flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CycloptsError as error:
        return _fail(2, f"error: {error}; see esm-turbo --help", debug)
    except (ValueError, ImportError) as error:
        return _fail(2, f"error: {error}", debug)
    except OSError as error:
        return _fail(1, f"error: {error}", debug)
    except Exception as error:
        from esm_turbo.model.memory import is_out_of_memory

        if is_out_of_memory(error):
            return _fail(1, f"error: not enough memory ({str(error) or type(error).__name__})", debug)
        return _fail(1, f"error: {type(error).__name__}: {error}; --debug shows where", debug)


def _fail(code: int, message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    say(message)
    return code


if __name__ == "__main__":
    main()
