"""Every Python and shell block of README.md and docs/ runs, on the embedded model and without a network."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from sybil import Example

from tests.helpers.pages import Page, blocks, language, other_blocks, reason_not_run, same_output

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

# What is not run: the first two words of each block, and the reason that stands above it.
CHECKPOINT = "needs one of Meta's checkpoints"
NOT_RUN = {
    "README.md": [
        ("make demo", "each is a step of `.ci/run`"),
        ("esm-turbo calibrate", CHECKPOINT),
    ],
    "docs/accuracy.md": [("esm-turbo evaluate", "takes minutes")],
    "docs/clusters.md": [
        ("from esm_turbo", "starts processes, which a page's namespace cannot be imported into"),
        ("from esm_turbo", "needs GPUs and a model from the hub"),
        ("esm-turbo embed", "needs the extra `ray`"),
    ],
    "docs/coming_from.md": [
        ("esm-extract esm2_t33_650M_UR50D", "a command of fair-esm"),
        ("python predict.py", "a script of facebookresearch/esm"),
        ("esm-turbo variants", "names files that you have"),
        ("compute_pseudo_perplexity(model, tokenizer,", "functions of PepMLM's script"),
        ("turbo =", "needs a checkpoint from the hub"),
        ("from faesm.esm", "a class of FAESM"),
        ("model =", "a function of FastPLMs"),
        ("from esm.models.esmc", "classes of the package esm"),
        ("turbo =", "needs a checkpoint from the hub"),
        ("biotrainer train", "a command of biotrainer"),
    ],
    "docs/e1.md": [("esm-turbo variants", "takes minutes")],
    "docs/performance.md": [("python -m", "needs an NVIDIA GPU")],
    "docs/serving.md": [
        ("pip install", "runs until it is stopped"),
        # These three by test_serving.py.
        ("context=$(curl -sS", "needs the running service"),
        ("import json", "needs the running service"),
        ("homologs =", "needs the running service of E1"),
        ("python -c", "runs until it is stopped"),
    ],
}

# Blocks see the first proteins of these files only, so that a page takes seconds.
LARGE_FILES = ("proteins.fasta", "evaluation/cath_val200.fasta", "evaluation/long_human.fasta")
FIRST_PROTEINS = 12


def runnable(page: str) -> list[Example]:
    return [block for block in blocks(ROOT / page) if language(block) in ("python", "sh")]


@pytest.fixture
def working_folder(tmp_path: Path) -> Path:
    """A folder with a copy of `calibration_data/`, and what pages about E1 read."""
    copy = tmp_path / "calibration_data"
    shutil.copytree(ROOT / "calibration_data", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("models/e1-mini", "examples/e1"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in LARGE_FILES:
        records = (copy / name).read_text().split(">")[1 : FIRST_PROTEINS + 1]
        (copy / name).write_text("".join(f">{record}" for record in records))
    return tmp_path


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_page_runs(page: str, working_folder: Path) -> None:
    executed = Page(ROOT / page, working_folder).run()
    assert executed == len(runnable(page)) - len(NOT_RUN.get(page, []))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page: str) -> None:
    assert other_blocks(ROOT / page) == []


def test_blocks_that_do_not_run_are_listed() -> None:
    found: dict[str, list[tuple[str, str]]] = {}
    for page, block in itertools.chain.from_iterable(((p, b) for b in blocks(ROOT / p)) for p in PAGES):
        reason = reason_not_run(block)
        if reason is not None:
            found.setdefault(page, []).append((" ".join(block.parsed.split()[:2]), reason))
    assert found == NOT_RUN


@pytest.mark.parametrize("info", ["", "bash", "py"])
def test_a_block_of_another_language_is_found(tmp_path: Path, info: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```text\ntrue\n```\n\n```{info}\ntrue\n```\n")
    assert other_blocks(page) == [f"```{info}"]


def write(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return Page(path, folder)


def test_blocks_share_folder_and_names(tmp_path: Path) -> None:
    text = """
```sh
echo 3 > number
```
```python
number = int(open("number").read())
```
```python
print(number / 7)
```
```output
0.43
```
"""
    assert write(tmp_path, text).run() == 3


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert 1 > 2\n```\n", AssertionError),
        ("```sh\nfalse\ntrue\n```\n", AssertionError),
        ("```python\nprint(1)\n```\n```output\n2\n```\n", AssertionError),
        ("```output\n2\n```\n", AssertionError),
        ("<!-- not run: needs a GPU -->\n```python\n1 +\n```\n", SyntaxError),
        ("<!-- not run: needs a GPU -->\n```sh\nesm-turbo embed a.fasta out --no-such-option\n```\n", Exception),
    ],
    ids=["python", "shell", "output", "output of nothing", "syntax", "arguments"],
)
def test_what_is_wrong_in_a_block_is_found(tmp_path: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        write(tmp_path, text).run()


def test_a_block_with_a_reason_is_not_run(tmp_path: Path) -> None:
    text = """
<!-- not run: needs a GPU -->
```sh
esm-turbo info --json - && touch ran
```
<!-- not run: needs a GPU -->
```python
open("ran", "w")
```
"""
    page = write(tmp_path, text)
    assert [reason_not_run(block) for block in blocks(tmp_path / "page.md")] == ["needs a GPU"] * 2
    assert page.run() == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1.50 b", "a  1.511\nb\n", True),
        ("a 1.50 b", "a 1.60 b", False),
        ("a 12", "a 12", True),
        ("a 12", "a 13", False),
        ("1.2e-05", "1.25e-05", True),
        ("1.2e-05", "1.4e-05", False),
        ("first ... last", "first 2 3 4 last", True),
        ("first ...", "first", True),
        ("first ... last", "first 2 3 4", False),
        ("first", "first and more", False),
        ("[1.00, 2]", "[1.01, 2]", True),
        ("(x) 1.0", "x 1.0", False),
    ],
)
def test_same_output(shown: str, printed: str, same: bool) -> None:
    assert same_output(shown, printed) is same
