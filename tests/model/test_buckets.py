"""Shapes of graphs."""

from __future__ import annotations

import pytest

from esm_turbo.model.buckets import Bucket, bucket_of


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ((1, 21, 1, 501), Bucket(1, 24, 1, 512)),
        ((2, 1, 2, 129), Bucket(8, 8, 8, 256)),
        ((9, 1, 9, 129), Bucket(16, 8, 16, 256)),
        ((64, 33, 1, 513), Bucket(64, 48, 1, 768)),
        ((5, 49, 1, 1025), Bucket(8, 64, 1, 1536)),
        ((1, 4096, 1, 1), Bucket(1, 4096, 1, 128)),
        ((129, 24, 1, 4), None),
        ((1, 8, 1, 4097), None),
    ],
)
def test_buckets(shapes: tuple[int, int, int, int], expected: Bucket | None) -> None:
    assert bucket_of(*shapes) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ((1, 9, 1, 9), Bucket(1, 16, 1, 128, named=True)),
        ((6, 9, 2, 9), Bucket(8, 16, 4, 128, named=True)),
        ((20, 9, 5, 9), Bucket(32, 16, 16, 128, named=True)),
        ((6, 9, 5, 9), Bucket(8, 16, 8, 128, named=True)),
        ((6, 9, 7, 9), None),
    ],
)
def test_buckets_of_rows_that_name_their_contexts(shapes: tuple[int, int, int, int], expected: Bucket | None) -> None:
    assert bucket_of(*shapes, named=True) == expected


def test_buckets_hold_what_they_are_for() -> None:
    for number in range(1, 4097):
        bucket = bucket_of(1, number, 1, number)
        assert bucket is not None
        assert number <= bucket.tokens <= max(number + 7, 1.5 * number)
        assert number <= bucket.columns <= max(number + 127, 1.5 * number)
