"""Run the Dockerfile's steps without Docker: `python scripts/try_dockerfile.py FOLDER [NAME=VALUE]...`

FOLDER is made, and stands for the root of the image: what COPY copies lies in it, and the packages of RUN are installed
into a virtual environment in it, by the Python of the FROM line. Ends with the image's own command. NAME=VALUE replaces
the default of an ARG. Unlike a build, it uses this machine's system libraries.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(folder: Path, *given: str) -> None:
    """Run every step in turn; an error ends it, with the exit code of what failed."""
    folder = folder.absolute()
    folder.mkdir(parents=True)
    bin_folder = folder / "venv" / "bin"
    values: dict[str, str] = {}
    entry: list[str] = []
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word in ("", "#"):
            continue
        print(line, flush=True)
        if word == "FROM":
            python = "python" + rest.removeprefix("python:").partition("-")[0]
            subprocess.run([python, "-m", "venv", str(bin_folder.parent)], check=True)
        elif word == "ARG":
            name, _, default = rest.partition("=")
            values[name] = dict(one.split("=", 1) for one in given).get(name, default)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder / target[1:], dirs_exist_ok=True)
                else:
                    (folder / target[1:]).mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, folder / target[1:])
        elif word == "RUN":
            for name, value in values.items():
                rest = rest.replace(f"${name}", value)
            program, *arguments = (one.replace("/src", f"{folder}/src") for one in shlex.split(rest))
            subprocess.run([str(bin_folder / program), *arguments], check=True)
        elif word in ("ENTRYPOINT", "CMD"):
            entry += json.loads(rest)
        elif word != "WORKDIR":
            raise ValueError(f"the Dockerfile has {word}, which this script cannot run")
    program, *arguments = entry
    work = folder / "data"
    work.mkdir()
    subprocess.run([str(bin_folder / program), *arguments], cwd=work, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
