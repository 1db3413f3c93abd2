"""Import times, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.harness.measure import Case, Check, Figures, Target, spread

_IMPORTS = ("import esm_turbo", "from esm_turbo import TurboEsm")
_HELP = "esm-turbo --help"
_HEAVY = ("torch", "transformers")
_TIME = "import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
_LOADED = "import sys; print(*({modules!r} & sys.modules.keys()))"
_RUN_HELP = "from esm_turbo.cli.app import main; main(['--help'])"


def cases() -> Iterator[Case]:
    """One row: statements are timed inside the process, the command as a whole process."""

    def check() -> Check:
        heavy = set(_HEAVY)
        after_import = _python("import esm_turbo; " + _LOADED.format(modules=heavy))
        # The command exits, so its imports are printed at exit.
        at_exit = f"import atexit, sys; atexit.register(lambda: print('loaded:', *({heavy!r} & sys.modules.keys())))"
        page, _, after_help = _python(f"{at_exit}; {_RUN_HELP}").rpartition("loaded:")
        wrong = len(after_import.split()) + len(after_help.split()) + ("calibrate" not in page)
        what = "heavy modules that `import esm_turbo` and `esm-turbo --help` load, and 1 if the help is not shown"
        return Check(what, wrong, 0)

    def measure(repeats: int) -> Figures:
        times: dict[str, list[float]] = {name: [] for name in (*_IMPORTS, _HELP, "python, nothing imported")}
        for repeat in range(-1, repeats):
            for name, seconds in times.items():
                begin = time.perf_counter()
                if name in _IMPORTS:
                    found = float(_python(_TIME.format(statement=name)))
                else:
                    _python(_RUN_HELP if name == _HELP else "pass")
                    found = time.perf_counter() - begin
                if repeat >= 0:
                    seconds.append(found)
        return {"seconds": spread(times)}

    limits = dict(zip(_IMPORTS, (0.3, 2.5), strict=True))
    yield Case(
        name="imports and help",
        model="none",
        shape={"processes": "fresh, file cache warm"},
        check=check,
        measure=measure,
        targets=[Target(("seconds", name, "p50"), at_most=limit) for name, limit in limits.items()],
    )


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
