"""Eight-bit products: what they cost in accuracy, what they change, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from esm_turbo import TurboEsmForMaskedLM
from esm_turbo.model.packing import Packing, attention_of_rows
from esm_turbo.model.precision import PRODUCTS, quantize_products, quantized_products
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM
from tests.helpers import torch_encoder
from tests.helpers.models import make_esm, make_esmc, random_ids
from tests.helpers.packed import packed_tokens, plan_with

LENGTHS = [17, 5, 30, 1]
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "ESM-2": lambda: TurboEsmForMaskedLM.from_esm(make_esm(layers=3), preset="exact"),
    "ESM-C": lambda: TurboEsmcForMaskedLM.from_esm(make_esmc(layers=3), preset="exact"),
}
# By chance the two may be rounded to neighbouring codes, of which one is an eighth of the other at most.
TOLERANCE = 0.1


def packed_states(model: PreTrainedModel, ids: Tensor, mask: Tensor, ops: ModuleType = torch_encoder) -> Tensor:
    encoder = model.base_model
    packing = Packing.of(LENGTHS, ids.shape[1], ids.device)
    embeddings = packing.pack(encoder.embed(ids, mask.bool(), None))
    attend = attention_of_rows(packing, ops, plan_with(None))
    tokens = packed_tokens(embeddings, packing.positions, encoder.rotary_frequencies, attend)
    return encoder.run_packed(tokens, ops)[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [(), [(1, "qkv"), (0, "attention_out"), (2, "mlp_in"), (1, "mlp_out")]])
@torch.no_grad()
def test_packed_rows_are_those_of_the_library(family: str, keep: list[tuple[int, str]]) -> None:
    model = FAMILIES[family]().bfloat16()
    ids, mask = random_ids(LENGTHS, masks=0)
    before = model.base_model(ids, mask).last_hidden_state[mask.bool()]
    quantize_products(model, keep)
    expected = model.base_model(ids, mask).last_hidden_state[mask.bool()]
    found = packed_states(model, ids, mask)
    print(relative_error(found, expected), relative_error(expected, before))
    assert quantized_products(model) == [(i, name) for i in range(3) for name in PRODUCTS if (i, name) not in keep]
