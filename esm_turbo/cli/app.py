"""The entry point of `esm-turbo`: exit codes, and errors in one line on standard error; `--debug` adds the traceback.

Exit codes: 0 success; 1 some records failed, or the job failed; 2 wrong arguments or unusable input, nothing written;
130 interrupted. Nothing but the standard library is imported before an interrupt can be caught, and commands import
the model libraries when they run, so that `--help` is quick.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from esm_turbo.cli.interrupts import interrupts

if TYPE_CHECKING:
    from cyclopts import CycloptsError

# What to give instead of one argument too many, by command.
_INSTEAD_OF_ARGUMENTS = {
    "embed": "the model, esm-extract's first argument, is --model here; ",
    **dict.fromkeys(("score", "variants"), "results are written to --out; "),
    "generate": "results are written to --out, and --positions takes a list such as 10-25,40; ",
}
# Commands for what users may call a task, by its name.
_OTHER_NAMES = {
    **dict.fromkeys(("design", "sample"), ("binders", "generate")),
    **dict.fromkeys(("fill", "inpaint", "complete"), ("generate",)),
    **dict.fromkeys(("rank", "screen", "perplexity", "likelihood"), ("score",)),
    **dict.fromkeys(("mutate", "mutations", "dms", "scan"), ("variants",)),
    **dict.fromkeys(("extract", "encode"), ("embed",)),
    **dict.fromkeys(("cache", "prefill"), ("store",)),
    **dict.fromkeys(("benchmark", "compare"), ("evaluate",)),
    **dict.fromkeys(("quantize", "compress"), ("calibrate",)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    # Otherwise Python looks for garbage in all modules as it ends, which takes longer than what some commands do.
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What an encoding lacks must not end a run that has written its results.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        interrupts.catch()
        code = run(sys.argv[1:] if arguments is None else arguments)
        interrupts.ignore()
    except KeyboardInterrupt:
        code = interrupts.report()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    debug = "--debug" in arguments
    arguments = _with_standard_input([argument for argument in arguments if argument != "--debug"])
    try:
        from esm_turbo.cli.commands import app
        from esm_turbo.cli.console import quiet, wording

        with quiet(debug), wording(partial(as_options, arguments=arguments)):
            code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader is gone, as in `| head`; the flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        if interrupts.pending or isinstance(error, KeyboardInterrupt):
            return interrupts.report()
        return _report(error, arguments)


def _with_standard_input(arguments: list[str]) -> list[str]:
    """Name standard input where `-` stands for it, which is not an option; as the value of `--json`, it is output."""
    before = ["", *arguments[:-1]]
    return [
        "/dev/stdin" if argument == "-" and option != "--json" else argument
        for option, argument in zip(before, arguments, strict=False)
    ]


def _report(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error in one line and return its exit code."""
    from cyclopts import CycloptsError, UnusedCliTokensError

    from esm_turbo.cli.console import say

    if isinstance(error, CycloptsError):
        unused = isinstance(error, UnusedCliTokensError)
        hint = _INSTEAD_OF_ARGUMENTS.get(arguments[0], "") if unused and arguments else ""
        chain = " ".join(error.command_chain or ())
        say(f"error: {_wrong_arguments(error)}; {hint}see {' '.join(['esm-turbo', chain]).strip()} --help")
        return 2
    if not isinstance(error, ValueError):
        from esm_turbo.model.memory import is_out_of_memory

        if is_out_of_memory(error):
            say(f"error: not enough memory ({str(error) or type(error).__name__})")
            return 1
    if isinstance(error, ValueError | ImportError | OSError):
        say(f"error: {as_options(str(error), arguments)}")
    else:
        say(f"error: {type(error).__name__}: {error}; --debug shows where")
    return 2 if isinstance(error, ValueError | ImportError) else 1


def _wrong_arguments(error: CycloptsError) -> str:
    """The error text for wrong arguments."""
    from cyclopts import MissingArgumentError, UnknownCommandError, UnusedCliTokensError

    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return _unknown_command(error.unused_tokens[0])
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        name = error.argument.name
        if not error.argument.tokens:
            return f"missing {'option' if name.startswith('-') else 'argument'} {name}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"unexpected {', '.join(map(repr, error.unused_tokens))}"
    return str(error).removesuffix(".")


def _unknown_command(word: str) -> str:
    """The error text for a command that does not exist: those that are likely meant, and all."""
    import difflib

    from esm_turbo.cli.commands import app

    names = [name for name in app if not name.startswith("-")]
    meant = {name: (name,) for name in names} | _OTHER_NAMES
    nearest = difflib.get_close_matches(word.lower(), meant, n=1, cutoff=0.7)
    proposed = f"did you mean {' or '.join(meant[nearest[0]])}? C" if nearest else "c"
    return f"there is no command {word!r}; {proposed}ommands are {', '.join(names)}"


def as_options(message: str, arguments: Sequence[str]) -> str:
    """A message with the names of arguments of Python calls, as in `top_k`, given as those of the command's options."""
    from esm_turbo.cli.commands import app

    if "`" not in message or not arguments or arguments[0].startswith("-") or arguments[0] not in app:
        return message
    found = app[arguments[0]].assemble_argument_collection()
    options = {name for argument in found for name in argument.names}

    def option(match: re.Match[str]) -> str:
        name = "--" + match[1].replace("_", "-")
        return name if name in options else match[0]

    return re.sub(r"`([a-z_]+)`", option, message)


if __name__ == "__main__":
    main()
