"""The bearer tokens that clients must have, from a file or the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from esm_turbo.files.text_files import NO_SUCH_FILE

VARIABLE = "ESM_TURBO_TOKENS"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")


def read_tokens(path: Path | None) -> list[str]:
    """The tokens of a file, one a line, or else of the variable `ESM_TURBO_TOKENS`, separated by blanks.

    Lines that begin with # are comments.

    Returns:
        The tokens; none if neither is given.

    Raises:
        ValueError: the file cannot be read, either is there and holds none, or one is not a token.
    """
    if path is None:
        if VARIABLE not in os.environ:
            return []
        source, lines = VARIABLE, os.environ[VARIABLE].split()
    else:
        source = os.fspath(path)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{source}: is not text; give one token a line") from None
        except FileNotFoundError:
            raise ValueError(f"{source}: {NO_SUCH_FILE}") from None
        except OSError as error:
            raise ValueError(f"{source}: cannot be read ({error.strerror})") from None
    tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not tokens:
        # Somebody meant the service to be closed.
        do = "give one, or unset it to let everybody in" if path is None else "give one a line"
        raise ValueError(f"{source}: holds no token; {do}")
    for number, token in enumerate(tokens, start=1):
        if _TOKEN.fullmatch(token) is None:
            # Not shown: it is a secret.
            raise ValueError(f"{source}: token {number} must have 16 to 512 letters, digits and . _ ~ + / -")
    return tokens
