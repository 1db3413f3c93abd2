"""QJL: unbiased scores."""

from __future__ import annotations

import pytest

from tests.helpers.peer_codecs import assert_unbiased_scores


@pytest.mark.parametrize("head_dim", [64, 24, 16])
def test_scores_are_unbiased(head_dim: int) -> None:
    assert_unbiased_scores("qjl", head_dim)
