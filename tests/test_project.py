"""The project's own files agree with each other: versions, pins, README commands, package data."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import esm_turbo

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ("constraints.txt", "constraints-oldest.txt")

# A folder of somebody's machine, or one beside the repository. Addresses on the web are no paths.
FOREIGN_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|mnt|opt|root|scratch|tmp|work|Users)/\w|\.\./shared\b")
NOT_OURS = {".git", ".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def pins(name: str) -> dict[str, Version]:
    """The versions of a constraints file by canonical package name."""
    requirements = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]
    pinned = {}
    for line in requirements:
        package, version = line.split("==")
        assert canonicalize_name(package) not in pinned, f"{package} is pinned twice in {name}"
        pinned[canonicalize_name(package)] = Version(version)
    return pinned


def requirements(*extras: str) -> list[Requirement]:
    """The core requirements and those of `extras`, without the package's references to itself."""
    project = PYPROJECT["project"]
    listed = project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]
    return [r for r in map(Requirement, listed) if r.name != project["name"]]


def ranges() -> list[Requirement]:
    """Every version range that `pyproject.toml` states."""
    return requirements(*PYPROJECT["project"]["optional-dependencies"])


# For work on the package: the others are for its users.
DEVELOPMENT = {"browser", "dev", "docs", "notebooks", "test"}


def test_one_extra_installs_what_all_others_for_users_do() -> None:
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    assert extras >= DEVELOPMENT | {"all"}
    [everything] = map(Requirement, PYPROJECT["project"]["optional-dependencies"]["all"])
    assert everything.name == PYPROJECT["project"]["name"]
    assert everything.extras == extras - DEVELOPMENT - {"all"}


def test_the_extras_for_users_are_documented() -> None:
    section = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("\n## Extras\n")[2]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(set(PYPROJECT["project"]["optional-dependencies"]) - DEVELOPMENT)


def test_triton_is_bounded_by_the_version_that_is_tested() -> None:
    tested, declared = pins("constraints.txt")["triton"], requirements("triton")[-1]
    [bound] = [Version(s.version) for s in declared.specifier if s.operator == "<"]
    assert (declared.name, bound.release) == ("triton", (tested.major, tested.minor + 1))


def lower_bound(requirement: Requirement) -> Version:
    [bound] = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    return bound


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def make_commands(document: str) -> set[str]:
    """The targets of all `make` commands in the code of a Markdown file."""
    text = (ROOT / document).read_text()
    code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
    return set(re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join(code)))


def own_text_files() -> list[Path]:
    """The text files under version control, and those that are new; without git, all there are."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [
            p
            for p in ROOT.rglob("*")
            if not any(part in NOT_OURS or part.startswith(".venv") for part in p.relative_to(ROOT).parts)
        ]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()[:8192]]


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_pins_satisfy_the_stated_ranges(name: str) -> None:
    pinned = pins(name)
    compared = 0
    for requirement in ranges():
        version = pinned.get(canonicalize_name(requirement.name))
        if version is not None:
            compared += 1
            assert version in requirement.specifier, f"{name} pins {version}, not {requirement}"
    assert compared >= len(requirements())


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("constraints.txt", ("h5", "plot", "docs", "notebooks", "test", "dev")),
        ("constraints-oldest.txt", ("h5", "test")),
    ],
)
def test_what_the_makefile_installs_is_pinned(name: str, extras: tuple[str, ...]) -> None:
    missing = {canonicalize_name(r.name) for r in requirements(*extras)} - set(pins(name))
    assert not missing


def test_oldest_pins_are_the_lower_bounds() -> None:
    pinned = pins("constraints-oldest.txt")
    tested = [r for r in requirements("h5") if r.name != "torch"]
    assert {r.name: pinned[r.name] for r in tested} == {r.name: lower_bound(r) for r in tested}


def test_torch_is_one_version_everywhere() -> None:
    # Another version would pull a CUDA build, several GB, on machines that have a CPU build of this one.
    assert len({pins(name)["torch"] for name in CONSTRAINTS}) == 1


def test_pre_commit_uses_the_pinned_tools() -> None:
    pinned = pins("constraints.txt")
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    used = dict(re.findall(r"\b(ruff|mypy)==([\w.]+)", config))
    assert used
    assert {tool: Version(version) for tool, version in used.items()} == {tool: pinned[tool] for tool in used}


def test_version_is_the_same_everywhere() -> None:
    version = PYPROJECT["project"]["version"]
    assert esm_turbo.__version__ == version
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_make_commands_exist(document: str) -> None:
    named = make_commands(document)
    assert named
    assert named <= make_targets()


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in script
    commands = [line.removeprefix("make ") for line in script if line.startswith("make ")]
    assert commands[:3] == ["test", "lint", "types"]
    assert set(commands) <= make_targets()


def test_package_data_covers_every_shipped_file() -> None:
    package = ROOT / "esm_turbo"
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["esm_turbo"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    data = [p for p in package.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}]
    files = {p for p in data if not p.name.startswith(".")}
    assert package / "py.typed" in files
    assert files <= shipped


def test_no_path_of_one_machine_in_any_text_file() -> None:
    files = own_text_files()
    assert ROOT / "pyproject.toml" in files
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FOREIGN_PATH.search(line)
    ]
    assert not hits, "\n".join(hits)
