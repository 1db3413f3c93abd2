"""What pyproject.toml cannot say: the shipped proteins in a wheel, and the text of the package page."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = ("*.fasta", "*.csv", "*.md", "*.tsv")


class BuildWithProteins(build_py):
    """Copies `calibration_data/`, which lies beside the package in a checkout, into the package of a wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._proteins().items():
                self.mkpath(str(Path(target).parent))
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(() if self.editable_mode else self._proteins().values())]

    def _proteins(self) -> dict[str, str]:
        folder, target = ROOT / "calibration_data", Path(self.build_lib) / "esm_turbo" / "calibration_data"
        paths = sorted(path for pattern in DATA for path in folder.rglob(pattern))
        return {str(path): str(target / path.relative_to(folder)) for path in paths}


def package_page(readme: str, url: str | None = None) -> str:
    """README.md without links to files, which the page of a package index does not have.

    Args:
        readme: the text.
        url: where the files are, `Files` of `project.urls`; links then lead there. Without it they become plain text.
    """

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if url is None:
            return "" if image else text
        return f"{image}[{text}]({url.rstrip('/')}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        cmdclass={"build_py": BuildWithProteins},
        long_description=package_page(
            (ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Files")
        ),
        long_description_content_type="text/markdown",
    )
