"""Parts of a context and new tokens are combined: rows that share a tile, and rows that do not see a side.

`tests/ops/test_triton_attention.py` tests the whole kernel.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.attention_cases import codec_of, hiding_everything_from, make_case
from tests.helpers.triton_devices import on_devices, right_triton  # noqa: F401 - the fixture
from tests.ops.test_triton_attention import PRESETS, assert_close, attend, tune


@on_devices(
    "batch, n",
    cpu=[(20, 1), (3, 7)],
    gpu=[(1, 1), (2, 1), (5, 1), (20, 1), (3, 7), (300, 2)],
)
@pytest.mark.parametrize("programs", [1, 5, 264])
def test_masks_of_every_row_over_a_shared_context(
    monkeypatch: pytest.MonkeyPatch, device: str, batch: int, n: int, programs: int
) -> None:
    tune(monkeypatch, programs=programs)
    codec = codec_of("turbo2", 24)
    case = make_case(codec, batch=batch, shared=True, n=n, slots=2, masked=True, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices("batch, n", cpu=[(20, 1), (7, 5)], gpu=[(20, 1), (7, 5), (64, 3), (5, 17)])
@pytest.mark.parametrize("programs", [1, 30])
def test_many_rows_with_separate_contexts(
    monkeypatch: pytest.MonkeyPatch, device: str, batch: int, n: int, programs: int
) -> None:
    """Rows that share a tile of `merge`, whether it is full or not, do not see each other's tokens."""
    tune(monkeypatch, programs=programs)
    codec = codec_of("turbo2", 24)
    lengths = tuple(70 - 3 * row % 69 for row in range(batch))
    case = make_case(codec, batch=batch, n=n, slots=2, masked=True, lengths=lengths, device=device)
    assert_close(attend(case, codec), case.expected())


@on_devices(cpu=["turbo3", "paper"], gpu=PRESETS, names="preset")
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_that_sees_nothing_is_zero(device: str, preset: str, shared: bool) -> None:
    codec = codec_of(preset, 32)
    case = hiding_everything_from(make_case(codec, batch=3, shared=shared, slots=1, device=device), 1)
    output = attend(case, codec)
    assert_close(output, case.expected())
    assert (output[1] == 0).all()
    assert (output[[0, 2]] != 0).all()


@on_devices("hidden", cpu=["past", "protected", "new"], gpu=["past", "protected", "new"])
def test_a_row_that_does_not_see_one_side(device: str, hidden: str) -> None:
    codec = codec_of("turbo3", 16)
    case = make_case(codec, slots=1, device=device)
    dark = hiding_everything_from(case, 0)
    columns, n = case.context.mask.shape[1], case.query.shape[2]
    start, stop = {"past": (0, columns), "protected": (columns, columns + 1), "new": (columns + 1, None)}[hidden]
    seen = case.seen.clone()
    seen[:, start:stop] = dark.seen[:, start:stop]
    context, mask = case.context, None
    if hidden == "past":
        context = replace(context, mask=dark.context.mask, visible=dark.context.visible)
    elif hidden == "protected":
        context = replace(context, protected_mask=dark.context.protected_mask)
    else:
        mask = dark.mask
        assert not mask[0].any()
    case = replace(case, mask=mask, context=context, seen=seen)
    assert int(case.seen[0].sum()) == {"past": 1 + n, "protected": columns - 1 + n, "new": columns}[hidden]
    assert_close(attend(case, codec), case.expected())


@on_devices()
def test_a_context_of_no_tokens(device: str) -> None:
    """A row whose context is empty sees only the new tokens."""
    codec = codec_of("turbo3", 16)
    case = make_case(codec, lengths=(0, 70), device=device)
    assert_close(attend(case, codec), case.expected())
