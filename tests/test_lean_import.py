"""Importing the package and asking the command line for help load nothing heavy.

Everything runs in a fresh interpreter, and only its `sys.modules` is looked at.
"""

import json
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import transformers

import esm_turbo

TOO_OLD = "ESM-C needs transformers 5.16 or newer, installed is"
HAS_ESMC = hasattr(transformers, "EsmcModel")
# They draw, and are imported once that is asked for.
DRAWING = ("esm_turbo.pictures.hover", "esm_turbo.pictures.page", "esm_turbo.pictures.static")
HAS_PLOT = all(find_spec(name) for name in ("matplotlib", "logomaker"))

HEAVY = {"torch", "transformers", "triton", "matplotlib", "pandas", "sklearn"}

# Put before the code of interest: its last line on standard error lists the modules loaded in the end.
REPORT = """
import atexit, json, sys
atexit.register(lambda: print("\\n" + json.dumps(list(sys.modules)), file=sys.stderr))
"""


def run(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter with `argv` behind `sys.argv[0]`."""
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)


def loaded_modules(code: str, *argv: str) -> tuple[set[str], str]:
    """Modules loaded when `code` ended, and its standard output."""
    result = run(REPORT + code, *argv)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stderr.splitlines()[-1])), result.stdout


def package_modules() -> list[str]:
    """Every module but the Triton kernels, which alone may need triton, and those that need what is not installed."""
    names = [m.name for m in pkgutil.walk_packages(esm_turbo.__path__, "esm_turbo.")]
    left_out = ("esm_turbo.ops.kernels.", "esm_turbo.__main__")
    return [
        name
        for name in names
        if not name.startswith(left_out)
        and (HAS_ESMC or name != "esm_turbo.modeling_esmc_turbo")
        and (HAS_PLOT or name not in DRAWING)
    ]


def test_report_sees_a_heavy_import() -> None:
    modules, _ = loaded_modules("import torch")
    assert "torch" in modules


def test_import_of_the_package_is_free() -> None:
    modules, _ = loaded_modules("import esm_turbo; dir(esm_turbo); esm_turbo.__version__")
    assert "esm_turbo" in modules
    assert not modules & HEAVY


def test_help_does_not_load_the_model_libraries() -> None:
    code = "import runpy; runpy.run_module('esm_turbo.cli.app', run_name='__main__', alter_sys=True)"
    modules, stdout = loaded_modules(code, "--help")
    assert "calibrate" in stdout
    assert not modules & HEAVY


def test_every_module_imports_without_triton() -> None:
    code = """
import importlib, sys
sys.modules["triton"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    names = package_modules()
    assert "esm_turbo.config" in names
    result = run(code, *names)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_found() -> None:
    for name in esm_turbo.__all__:
        if HAS_ESMC or not name.startswith("TurboEsmc"):
            assert getattr(esm_turbo, name) is not None
        else:
            with pytest.raises(ImportError, match=TOO_OLD):
                getattr(esm_turbo, name)
    with pytest.raises(AttributeError, match="no attribute 'TurboESM'"):
        esm_turbo.TurboESM  # noqa: B018 - the access is the test
