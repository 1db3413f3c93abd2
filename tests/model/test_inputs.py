"""Inputs that a forward with a cache refuses: each with its message, and the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from esm_turbo import TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.model.inputs import check_new_tokens
from tests.helpers.models import CLS, MASK, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]


# Ids on a device are not waited for.
NAN_ON_A_DEVICE = {"an empty row", "only masks", "only masks and padding", "only masks, nothing else seen"}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def plain(tiny_model: MakeModel, request: pytest.FixtureRequest) -> TurboEsmForMaskedLM:
    return tiny_model().to(request.param)


@pytest.fixture
def cache(plain: TurboEsmForMaskedLM) -> TurboKVCache:
    with torch.no_grad():
        return plain(*random_ids([9, 5]), use_cache=True).past_key_values


def refuses(message: str, call: Any, *args: object, **options: object) -> None:
    """Ids lie on the host, where they are checked, and everything else on the model's device."""
    options |= {k: x.to(call.device) for k, x in options.items() if isinstance(x, torch.Tensor) and k != "input_ids"}
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(*args, **options)


@torch.no_grad()
def gives_nan(model: TurboEsmForMaskedLM, **options: Any) -> bool:
    return bool(model(**options).logits.isnan().any())


IDS = torch.tensor([[CLS, 5, 6, 7], [CLS, 8, 9, 10]])

PREFILLS = {
    "left padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])}, "row 1 is padded on the left"),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}, "row 0 is padded on the left or has"),
    "an empty row": ({"attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])}, "row 0 has no token"),
    "mask too long": ({"attention_mask": torch.ones(2, 5)}, r"`attention_mask` must be \[batch, n\] = \[2, 4\]"),
    "mask too short": ({"attention_mask": torch.ones(2, 3)}, "`attention_mask` must be"),
    "mask of one row": ({"attention_mask": torch.ones(1, 4)}, "`attention_mask` must be"),
    "mask of four dimensions": ({"attention_mask": torch.ones(2, 1, 4, 4)}, "`attention_mask` must"),
    "mask of other numbers": ({"attention_mask": torch.full((2, 4), 0.5)}, "zeros and ones"),
    "only masks": ({"input_ids": torch.tensor([[CLS, 5], [MASK, MASK]])}, "row 1 has no token but <mask>"),
    "only masks and padding": (
        {"input_ids": torch.tensor([[MASK, MASK, 1]]), "attention_mask": torch.tensor([[1, 1, 0]])},
        "row 0 has no token but <mask>",
    ),
    "an id too large": ({"input_ids": torch.tensor([[CLS, 33]])}, "`input_ids` must lie in 0 to 32"),
    "a negative id": ({"input_ids": torch.tensor([[CLS, -1]])}, "`input_ids` must lie in 0 to 32"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, r"must be \[batch, n\] with n >= 1"),
    "no rows": ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, r"must be \[batch, n\]"),
    "one dimension": ({"input_ids": torch.tensor([CLS, 5])}, r"must be \[batch, n\]"),
    "no input": ({"input_ids": None}, "needs `input_ids`"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 4, 64)}, "needs `input_ids`"),
    "embeddings too": ({"inputs_embeds": torch.zeros(2, 4, 64)}, "needs `input_ids`"),
    "ids that are no integers": ({"input_ids": torch.zeros(2, 4)}, "`input_ids` must be int64 or int32, got torch.f"),
    "positions that are no integers": ({"position_ids": torch.zeros(2, 4)}, "`position_ids` must be integers"),
    "positions of another length": ({"position_ids": torch.arange(5)[None]}, r"`position_ids` must be \[batch, 4\]"),
    "positions of another batch": ({"position_ids": torch.arange(4).repeat(3, 1)}, "`position_ids` must be"),
    "positions of one dimension": ({"position_ids": torch.arange(4)}, "`position_ids` must be"),
    "negative positions": ({"position_ids": torch.arange(4)[None] - 1}, "must lie in 0 to 2147483647, got -1"),
    "another kind of past": ({"past_key_values": ((torch.zeros(1),),)}, "must be a TurboKVCache, got tuple"),
}  # fmt: skip


@pytest.mark.parametrize("case", PREFILLS)
def test_a_prefill_refuses(plain: TurboEsmForMaskedLM, case: str) -> None:
    options, message = PREFILLS[case]
    if plain.device.type == "cuda" and case in NAN_ON_A_DEVICE:
        assert gives_nan(plain, **({"input_ids": IDS, "use_cache": True} | options))
        return
    refuses(message, plain, **({"input_ids": IDS, "use_cache": True} | options))
    refuses(message, plain.esm, **({"input_ids": IDS, "use_cache": True} | options))


NEW = torch.tensor([[5, 6, 7], [8, 9, 10]])

EXTENSIONS = {
    "too many rows": ({"input_ids": NEW[[0, 1, 1]]}, "the cache has 2 rows, the extension 3"),
    "too few rows": ({"input_ids": NEW[:1]}, "the cache has 2 rows, the extension 1"),
    "mask of another length": ({"attention_mask": torch.ones(2, 11)}, r"\[2, 3\] or \[batch, past \+ n\] = \[2, 12\]"),
    "mask of another batch": ({"attention_mask": torch.ones(1, 12)}, "`attention_mask` must be"),
    "mask of one dimension": ({"attention_mask": torch.ones(12)}, "`attention_mask` must have two dimensions"),
    "mask of other numbers": ({"attention_mask": torch.full((2, 12), 2)}, "zeros and ones"),
    "left padding": ({"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}, "row 1 is padded on the left"),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "row 0 is padded on the left or has holes"),
    "a hole in the longer mask": (
        {"attention_mask": torch.tensor([[1] * 9 + [0, 1, 1], [1] * 5 + [0] * 4 + [1] * 3])},
        "row 0 is padded on the left or has holes",
    ),
    "only masks, nothing else seen": (
        {
            "input_ids": torch.full((2, 3), MASK),
            "attention_mask": torch.tensor([[0] * 9 + [1] * 3, [1] * 5 + [0] * 4 + [1] * 3]),
        },
        "row 0 has no token but <mask>",
    ),
    "an id too large": ({"input_ids": torch.tensor([[33], [5]])}, "`input_ids` must lie in 0 to 32"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "n >= 1"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 3, 64)}, "needs `input_ids`"),
    "attentions": ({"output_attentions": True}, "`output_attentions` is not available"),
    "causal attention": ({"is_causal": True}, "`is_causal` is not available for an extension"),
    "counts of one row": ({"token_counts": (torch.tensor([9]), torch.tensor([1]))}, r"integers \[batch\] = \[2\]"),
    "counts in a column": ({"token_counts": (torch.ones(2, 1).long(),) * 2}, r"got torch.int64 \[2, 1\]"),
    "counts that are no integers": ({"token_counts": (torch.ones(2),) * 2}, r"got torch.float32 \[2\]"),
    "more masks than tokens": (
        {"token_counts": (torch.tensor([9, 9]), torch.tensor([1, 10]))},
        r"tokens, and masks among them, got \[9, 9\], \[1, 10\]",
    ),
    "negative masks": ({"token_counts": (torch.tensor([9, 9]), torch.tensor([1, -1]))}, "masks among them"),
    "positions of another length": ({"position_ids": torch.arange(4)[None]}, r"`position_ids` must be \[batch, 3\]"),
    "positions of another batch": ({"position_ids": torch.arange(3).repeat(3, 1)}, "`position_ids` must be"),
    "negative positions": ({"position_ids": torch.tensor([[-1, 0, 1]])}, "must lie in 0 to 2147483647, got -1"),
    "large positions": ({"position_ids": torch.tensor([[0, 1, 2**31]])}, "must lie in 0 to 2147483647, got 2147483648"),
    "an append mask of another shape": (
        {"use_cache": True, "append_mask": torch.ones(2, 4, dtype=torch.bool)}, "`append_mask` must be"),
    "an append mask that keeps padding": (
        {
            "use_cache": True,
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "append_mask": torch.ones(2, 3, dtype=torch.bool),
        },
        "`append_mask` keeps tokens that `attention_mask` hides",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXTENSIONS)
def test_an_extension_refuses(plain: TurboEsmForMaskedLM, cache: TurboKVCache, case: str) -> None:
    options, message = EXTENSIONS[case]
    before = cache.nbytes
    if plain.device.type == "cuda" and case in NAN_ON_A_DEVICE:
        assert gives_nan(plain, **({"input_ids": NEW, "past_key_values": cache} | options))
        return
    refuses(message, plain, **({"input_ids": NEW, "past_key_values": cache} | options))
    refuses(message, plain.esm, **({"input_ids": NEW, "past_key_values": cache} | options))
    assert (cache.nbytes, cache.lengths.tolist()) == (before, [9, 5])


def test_a_mask_that_shows_what_is_not_there(plain: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    """On a device it shows nothing there: lengths are not waited for."""
    shown = torch.ones(2, 12, dtype=torch.int64)
    if plain.device.type == "cpu":
        refuses("shows past tokens that row 1 does not hold: it has 5", plain, NEW, shown, past_key_values=cache)
    else:
        with torch.no_grad():
            found = [plain(NEW, mask, past_key_values=cache).logits for mask in (shown, None)]
        assert (found[0] - found[1]).abs().max() <= 2e-5


INDEXES = {
    "too few": ([0], r"`context_index` must be integers \[batch\] = \[2\], got torch.int64 \[1\]"),
    "of two dimensions": (
        torch.zeros(2, 1, dtype=torch.int64),
        "`context_index` must be integers .* got .* \\[2, 1\\]",
    ),
    "numbers that are no integers": ([0.0, 1.0], "`context_index` must be integers .* got torch.float32"),
    "a mask": (torch.tensor([True, False]), "`context_index` must be integers .* got torch.bool"),
    "names": (["a", "b"], "`context_index` must be integers .* got \\['a', 'b'\\]"),
    "too large": ([1, 2], "`context_index` of row 1 must lie in 0 to 1, got 2"),
    "negative": ([-1, 0], "`context_index` of row 0 must lie in 0 to 1, got -1"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_of_contexts_that_is_refused(plain: TurboEsmForMaskedLM, cache: TurboKVCache, case: str) -> None:
    index, message = INDEXES[case]
    refuses(message, plain, NEW, past_key_values=cache, context_index=index)
    refuses(message, plain.esm, NEW, past_key_values=cache, context_index=index)


def test_what_cannot_be_done_with_contexts_that_rows_name(plain: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    message = "nothing can be appended to contexts that rows name"
    refuses(message, plain, NEW, past_key_values=cache, context_index=[0, 1], use_cache=True)
    assert cache.lengths.tolist() == [9, 5]
    refuses("`context_index` needs `past_key_values`", plain, NEW, context_index=[0, 1])
    if plain.device.type == "cpu":
        shown = torch.ones(2, 12, dtype=torch.int64)
        refuses("shows past tokens that row 0 does not hold: it has 5", plain, NEW, shown, past_key_values=cache,
                context_index=[1, 0])  # fmt: skip
    refuses("the cache has 2 rows, the extension 3; only 1 row is", plain, NEW[[0, 1, 1]], past_key_values=cache)


def test_many_rows_are_not_appended_to_one(plain: TurboEsmForMaskedLM) -> None:
    with torch.no_grad():
        cache = plain(IDS[:1], use_cache=True).past_key_values
    message = "cannot append 2 rows to a cache of one.*batch_repeat_interleave"
    refuses(message, plain, NEW, past_key_values=cache, use_cache=True)
    assert cache.lengths.tolist() == [4]


def test_a_cache_under_grad(plain: TurboEsmForMaskedLM, cache: TurboKVCache) -> None:
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        plain(IDS, use_cache=True)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        plain(NEW, past_key_values=cache)
    assert plain(IDS).logits.requires_grad


@pytest.mark.parametrize(
    ("keep", "skips"), [([[1, 1, 0], [0, 0, 0]], False), ([[0, 1, 1], [1, 1, 1]], True), ([[1, 0, 1], [0, 0, 0]], True)]
)
def test_tokens_left_out_before_others_are_found(keep: list[list[int]], skips: bool) -> None:
    """Only then are positions stored, which a device keeps, and steps of generation are to know beforehand."""
    assert check_new_tokens(NEW, None, torch.tensor(keep).bool()).skips is skips
