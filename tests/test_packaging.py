"""What is installed: wheels, editable installs, the container image and the conda recipe.

Neither Docker nor conda is needed: the files that they read are compared with the project's own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
# What the build reads; the Dockerfile copies the same.
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "calibration_data", "esm_turbo")
# What a source distribution has besides.
OTHERS = (
    "MANIFEST.in", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Dockerfile", "Makefile", "conda",
    "constraints.txt", "constraints-oldest.txt", "docs", "mkdocs.yml", "scripts", "tests",
)  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, in a folder named as the package."""
    folder = tmp_path_factory.mktemp("parent") / "esm_turbo"
    folder.mkdir()
    for name in (*SOURCES, *OTHERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def build(clone: Path, kind: str, out: Path) -> tuple[Path, str]:
    """Build a wheel as pip does; the wheel, and what the build says."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", code, out], cwd=clone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("*.whl")
    return wheel, done.stdout + done.stderr


def run(code: str, folder: Path, path: Path | None = None) -> str:
    """Run Python in a folder, without this checkout; `path` is where packages are installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # `-c` puts the folder first on the path, as an interactive Python does.
    start = f"import sys; sys.path = [path for path in sys.path if path != {str(ROOT)!r}]\n"
    if path is not None:
        start += f"import site; site.addsitedir({str(path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_clone_does_not_hide_its_editable_install(clone: Path, tmp_path: Path) -> None:
    """Python that is started beside a clone finds the package in it, not a namespace of the clone's folder."""
    wheel, _ = build(clone, "editable", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as file:
        [pth] = [name for name in file.namelist() if name.endswith(".pth")]
        assert Path(file.read(pth).decode().strip()) == clone
        assert not [name for name in file.namelist() if "finder" in name]
        file.extractall(tmp_path / "site")
    code = "import esm_turbo; from esm_turbo import TurboEsm; print(esm_turbo.__file__)"
    assert Path(run(code, clone.parent, tmp_path / "site")) == clone / "esm_turbo" / "__init__.py"


def test_a_wheel_has_everything_and_its_build_warns_of_nothing(clone: Path, tmp_path: Path) -> None:
    wheel, said = build(clone, "wheel", tmp_path / "wheel")
    ours = [line for line in said.splitlines() if "warn" in line.lower() or "deprecat" in line.lower()]
    # Whether Python may write bytecode is the environment's choice.
    assert [line for line in ours if "byte-compiling is disabled" not in line] == []
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
        [metadata] = [file.read(name).decode() for name in file.namelist() if name.endswith("METADATA")]
    assert "# esm_turbo" in metadata
    assert re.findall(r"\]\((?!https?:|mailto:|#)", metadata) == []
    installed = tmp_path / "site" / "esm_turbo"
    for path in (ROOT / "calibration_data").rglob("*.*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = installed / path.relative_to(ROOT)
            assert copy.read_bytes() == path.read_bytes()
    code = "from esm_turbo.assets import calibration_proteins; print(calibration_proteins())"
    path = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    assert Path(run(path + code, tmp_path)) == installed / "calibration_data" / "proteins.fasta"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "esm_turbo", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, PROJECT["version"])


def test_links_of_the_package_page() -> None:
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "![x](docs/a.svg) [b](docs/b.md#c) [w](https://example.org/a) [h](#here)"
    assert module.package_page(text) == " b [w](https://example.org/a) [h](#here)"
    assert module.package_page(text, "https://example.org/main/") == (
        "![x](https://example.org/main/docs/a.svg) [b](https://example.org/main/docs/b.md#c)"
        " [w](https://example.org/a) [h](#here)"
    )


def test_the_container_image_copies_what_it_installs() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert set(copied) == {*SOURCES, "constraints.txt"}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    [install] = [line for line in lines if line.startswith("RUN ")]
    assert '-c /src/constraints.txt "/src[h5]"' in install and "h5" in PROJECT["optional-dependencies"]
    [image] = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert (
        f"Programming Language :: Python :: {image.removeprefix('python:').partition('-')[0]}" in PROJECT["classifiers"]
    )
    assert 'ENTRYPOINT ["esm-turbo"]' in lines and "esm-turbo" in PROJECT["scripts"]


def test_the_install_step_of_the_image_resolves(clone: Path, tmp_path: Path) -> None:
    """pip accepts the step, and every requirement is pinned: nothing newer than what is tested gets into the image."""
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    [install] = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("RUN pip ")]
    step = install.removeprefix("RUN pip install ").replace('"/src[h5]"', f"{clone}[h5]")
    step = step.replace("/src", str(tmp_path)).replace('--extra-index-url "$TORCH_INDEX" ', "")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", "--no-deps", *step.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (tmp_path / "constraints.txt").open() if "==" in line
    }
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["h5"]]
    assert {Requirement(one).name for one in needed} <= pinned


def test_the_conda_recipe_states_what_the_project_does() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == PROJECT["version"]
    python = f"python {PROJECT['requires-python']}"
    wanted = [Requirement(one) for one in PROJECT["dependencies"]]
    expected = [f"{CONDA_NAMES.get(one.name, one.name)} {_conda(one)}" for one in wanted]
    assert recipe["requirements"]["run"] == [python, *expected]
    built_by = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert recipe["requirements"]["host"] == [
        python,
        "pip",
        *(f"{(r := Requirement(b)).name} {_conda(r)}" for b in built_by),
    ]
    [entry] = recipe["build"]["python"]["entry_points"]
    assert entry == f"esm-turbo = {PROJECT['scripts']['esm-turbo']}"
    assert (ROOT / recipe["about"]["license_file"]).is_file()


def _conda(requirement: Requirement) -> str:
    """A version range in conda's order, lower bound first."""
    return ",".join(sorted(map(str, requirement.specifier), key=lambda one: not one.startswith(">=")))
