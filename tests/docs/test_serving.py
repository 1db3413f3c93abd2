"""The requests of docs/serving.md, as they stand there, are answered by the service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serve.process import Process
from tests.helpers.models import E1_MINI
from tests.helpers.pages import blocks, language, reason_not_run, same_output

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
ADDRESS = "http://127.0.0.1:8080"


@pytest.mark.docs
@pytest.mark.slow
def test_the_requests_of_the_page_are_answered(tmp_path: Path) -> None:
    own = blocks(PAGE)
    asking = [number for number, block in enumerate(own) if reason_not_run(block) == "needs the running service"]
    curl, python = (own[number].parsed for number in asking)
    answer = own[asking[0] + 1]
    assert [language(own[number]) for number in asking] == ["sh", "python"] and language(answer) == "text"
    with Process("--store", tmp_path / "store") as service:
        here = f"http://127.0.0.1:{service.port}"
        printed = [
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
            for command in (
                [
                    "bash",
                    "-euo",
                    "pipefail",
                    "-c",
                    curl.replace(ADDRESS, here).replace("python ", f"{sys.executable} "),
                ],
                [sys.executable, "-c", python.replace(ADDRESS, here)],
            )
        ]
    assert same_output(answer.parsed, printed[0]), printed[0]
    scores, usage = printed[1].splitlines()
    assert "GSGSWKDLAE" in scores and "PLLKRR" in scores and "prompt_tokens" in usage


@pytest.mark.docs
@pytest.mark.slow
def test_the_requests_with_homologs_are_answered(tmp_path: Path) -> None:
    [post] = (one.parsed.split("\n\ncontext =")[0] for one in blocks(PAGE) if one.parsed.startswith("import json"))
    [asking] = (one.parsed for one in blocks(PAGE) if reason_not_run(one) == "needs the running service of E1")
    with Process("--store", tmp_path / "store", "--model", E1_MINI) as service:
        code = post.replace(ADDRESS, f"http://127.0.0.1:{service.port}") + "\n" + asking
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    variants, designs = printed.splitlines()
    assert "V7A" in variants and "log_probs" in designs
