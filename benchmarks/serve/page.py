"""Drive the page of the service in Chromium, and append the outcome to results/serve.jsonl.

python -m benchmarks.serve.page
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cuda.gpu_tests import summary
from benchmarks.harness import records


def main() -> int:
    """Run the tests, append a row, and return the exit code of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "browser", "tests/serve", f"--junitxml={report}"]
        code = subprocess.run(command, check=False).returncode
        figures = summary(report)
    version = subprocess.run(["chromium", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    ran = "python -m benchmarks.serve.page"
    records.append(records.RESULTS / "serve.jsonl", "serve_page", {"command": ran, "browser": version, **figures})
    return code


if __name__ == "__main__":
    sys.exit(main())
