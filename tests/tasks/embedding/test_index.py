"""The index of a folder of embeddings, written in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esm_turbo.tasks.embedding.index import EmbeddingIndex

ROWS = [("a", 3, ["a.pt", ""]), ("b", 4, ["b.pt", ""]), ("c", 5, ["c.pt", ""])]


class Killed(BaseException):
    """As if the process was killed: nothing that follows is done."""


class Torn:
    """A file that takes so many bytes."""

    def __init__(self, file: Any, left: list[int]) -> None:
        self.file, self.left = file, left

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: bytes) -> int:
        taken = content[: self.left[0]]
        self.left[0] -= len(taken)
        self.file.write(taken)
        if len(taken) < len(content):
            raise Killed
        return len(taken)


@pytest.mark.parametrize("before", [0, 1])
def test_rows_of_a_batch_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    opened = Path.open
    sizes = []
    for bytes_written in range(200):
        path = tmp_path / f"{bytes_written}.tsv"
        index = EmbeddingIndex(path)
        for row in ROWS[:before]:
            index.add(*row)
        index.commit()
        for row in ROWS[before:]:
            index.add(*row)
        left = [bytes_written]
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", lambda self, *a, left=left, **k: Torn(opened(self, *a, **k), left))
            try:
                index.commit()
            except Killed:
                sizes.append(bytes_written)
        found = EmbeddingIndex(path)
        expected = ROWS if bytes_written not in sizes else ROWS[:before]
        assert [row[0] for row in found.rows] == [row[0] for row in expected]
        assert not found.damaged
        # The next commit replaces what was left.
        for row in ROWS:
            found.add(*row)
        found.commit()
        assert [row[0] for row in EmbeddingIndex(path).rows] == ["a", "b", "c"]
    assert sizes == list(range(len(sizes))) and 20 < len(sizes) < 199
