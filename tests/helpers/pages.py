"""Runs the code blocks of a Markdown page, one after the other, in a folder and a namespace that they share.

What a block's language says:

- `python` runs in this process, `sh` in a shell of its own.
- `output` is what the block before it prints. Numbers with a decimal point may differ by 1 % and one unit of the last
  digit, and three dots stand for any text.
- `text` is not code.

`<!-- not run: REASON -->` above a block says that it is not run. Its Python must compile all the same, and its
`esm-turbo` commands must have arguments that the program takes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sybil import Document, Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from esm_turbo.cli.commands import app

LANGUAGES = ("python", "sh", "output", "text")
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->\n\Z")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_DOTS = r"(?:\s.*)?"


def blocks(path: Path) -> list[Example]:
    """The code blocks of a page whose language is one of `LANGUAGES`, in order."""
    return list(Page(path, path.parent).document.examples())


def other_blocks(path: Path) -> list[str]:
    """The first lines of the code blocks of a page whose language is none of `LANGUAGES`."""
    fences = re.findall(r"^ *```.*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [fence for fence in fences[::2] if fence.strip(" `") not in LANGUAGES]


def language(block: Example) -> str:
    """What stands after the fence of a block."""
    return str(block.region.lexemes["arguments"])


def reason_not_run(block: Example) -> str | None:
    """What the comment above a block says of why it is not run, None where there is none."""
    found = _NOT_RUN.search(block.document.text[: block.start])
    return found["reason"] if found else None


class Page:
    """A page whose blocks are evaluated by `run`.

    Args:
        path: of the Markdown file.
        folder: where blocks run; what they write stays in there.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        self._printed: str | None = None
        self._python = PythonEvaluator()
        evaluators = {"python": self._run_python, "sh": self._run_shell, "output": self._compare, "text": self._pass}
        self.document: Document = Sybil([CodeBlockParser(*each) for each in evaluators.items()]).parse(path)

    def run(self) -> int:
        """Evaluates every block, and returns how many were executed."""
        executed = 0
        for block in self.document.examples():
            block.evaluate()
            executed += language(block) in ("python", "sh") and reason_not_run(block) is None
        return executed

    def _run_python(self, block: Example) -> None:
        if reason_not_run(block):
            compile(block.parsed, block.path, "exec")
            self._printed = None
            return
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            self._python(block)
        self._printed = printed.getvalue()

    def _run_shell(self, block: Example) -> None:
        if reason_not_run(block):
            self._printed = None
            for arguments in esm_turbo_commands(block.parsed):
                app.parse_args(arguments, exit_on_error=False, print_error=False)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.parsed],
            cwd=self.folder,
            env=_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block.path}, line {block.line}: exit code {done.returncode}\n{done.stderr}"
        self._printed = done.stdout

    def _compare(self, block: Example) -> None:
        where = f"{block.path}, line {block.line}"
        assert self._printed is not None, f"{where}: nothing has run whose output this could be"
        assert same_output(block.parsed, self._printed), f"{where}: what was printed is\n{self._printed}"

    def _pass(self, block: Example) -> None:
        """Nothing to do for `text`."""


def esm_turbo_commands(source: str) -> Iterator[list[str]]:
    """The arguments of each `esm-turbo` command in a shell block."""
    for line in source.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command = list(itertools.takewhile(lambda word: not set(word) <= set("();<>|&"), words))
        if command[:1] == ["esm-turbo"]:
            yield command[1:]


def same_output(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, white space aside."""
    words = [_pattern(word) for word in shown.split()]
    found = re.fullmatch(r"\s*" + r"\s+".join(words).replace(rf"\s+{_DOTS}", _DOTS) + r"\s*", printed, re.DOTALL)
    return found is not None and all(map(_same_number, _NUMBER.findall(shown), found.groups()))


def _pattern(word: str) -> str:
    """A pattern of what may stand for a word: any number for a number, anything for three dots."""
    if word == "...":
        return _DOTS
    return f"({_NUMBER.pattern})".join(re.escape(text) for text in _NUMBER.split(word))


def _same_number(shown: str, printed: str) -> bool:
    if "." not in shown and "e" not in shown:
        return shown == printed
    mantissa, _, exponent = shown.replace(",", "").partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    value, other = float(shown.replace(",", "")), float(printed.replace(",", ""))
    return abs(value - other) <= 0.01 * abs(value) + last_digit


def _environment() -> dict[str, str]:
    """Of shell blocks: this Python's programs first, no network, no colours, a fixed width, one thread."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    fixed = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return os.environ | {"PATH": path} | fixed
