"""E1 on packed tokens, by plain operations, against its own forward: without a context, prefilled and extended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from esm_turbo import KVCalibrator, TurboEsm
from esm_turbo.config import Backend
from esm_turbo.model.executor import Executor
from esm_turbo.ops import triton_encoder
from esm_turbo.proteins.e1_tokenizer import E1Tokenizer
from tests.helpers import torch_encoder
from tests.helpers.e1 import make_e1, random_row
from tests.helpers.models import E1_MINI
from tests.helpers.triton_devices import on_devices, right_triton  # noqa: F401

CONTEXTS = ["MKTAYIAKQRQISFVKSHFSRQ,MKSAYLAKQRHISFIKAHFSRQLEE,MRTAFIAKQ", "MKXXTAYX,XGSW", "MKSAYLAKQRH"]
QUERIES = ["MKTAYI?KQ", "MKTAXIAKQ", "WKTAYIAK?"]


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[int]]:
    """Turns packed forwards on and off, and counts their tokens."""
    for name in torch_encoder.__all__:
        monkeypatch.setattr(triton_encoder, name, getattr(torch_encoder, name))
    run, seen = Executor._run_packed, []

    def counted(self: Executor, plan: object) -> object:
        seen.append(1)
        return run(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Executor, "_run_packed", counted)

    def turn(on: bool) -> list[int]:
        monkeypatch.setattr(Executor, "_can_pack", lambda self, plan: on)
        monkeypatch.setattr("esm_turbo.model.cache_engine.CacheEngine.compile_ahead", lambda self, *codecs: None)
        seen.clear()
        return seen

    return turn


def both(packs: Callable[[bool], list[int]], call: Callable[[], torch.Tensor], forwards: int) -> None:
    assert packs(False) == []
    expected = call()
    count = packs(True)
    found = call()
    # The first call stacks the weights, is told that they have moved, and runs again.
    assert len(count) >= forwards
    # Both in float32, with sums in another order; logits are of size ten.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("index", [None, [2, 0, 1]])
def test_contexts_and_queries(e1: TurboEsm, packs: Callable[[bool], list[int]], index: list[int] | None) -> None:
    """Of many homologs and of one, with X, whose position is kept."""

    def call() -> torch.Tensor:
        output = e1.extend(e1.prefill(CONTEXTS), QUERIES, context_index=index)
        return torch.where(output.attention_mask[..., None] != 0, output.logits, 0)

    both(packs, call, 2)


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_context_for_all(e1: TurboEsm, packs: Callable[[bool], list[int]], context: str) -> None:
    both(packs, lambda: e1.extend(e1.prefill(context), [QUERIES[0], QUERIES[2]]).logits, 2)


@torch.no_grad()
def test_hidden_states_of_rows_without_a_context(e1: TurboEsm, packs: Callable[[bool], list[int]]) -> None:
    rows = [e1.codes.whole(e1.codes.encode(one, "it")) for one in ("MKTAYIAK", "MK", "GSWKDMK")]
    rows[2] = [*rows[2], *rows[0]]
    ids, mask = e1.codes.batch(rows)

    def call(layer: int) -> torch.Tensor:
        lengths = mask.sum(1).tolist()
        states = e1.model.base_model(ids, mask, output_hidden_states=True, row_lengths=lengths).hidden_states
        return states[layer][mask != 0]

    for layer in (0, 3, 12):
        both(packs, partial(call, layer), 1)


@on_devices("preset", cpu=("exact",), gpu=("exact", "turbo3"))
@torch.no_grad()
def test_with_kernels(device: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Global and within layers, of contexts that kernels wrote, against plain attention to the same contexts."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    turbo = TurboEsm(make_e1(head_dim=16, layers=6), E1Tokenizer.from_pretrained(E1_MINI))
    calibration = KVCalibrator(turbo.model).partial_fit(random_row([90, 80, 60])).finalize(["turbo3"])
    turbo.model.to(device, dtype)
    if device == "cpu":
        # Flash attention runs on a GPU only.
        monkeypatch.setattr(triton_encoder, "attend", torch_encoder.attend)
        monkeypatch.setattr(Executor, "_can_pack", lambda self, plan: self.kv.kv_backend.name is Backend.TRITON)
        monkeypatch.setattr("esm_turbo.model.cache_engine.CacheEngine.compile_ahead", lambda self, *codecs: None)
    run, packed = Executor._run_packed, set()

    def noted(self: Executor, plan: object) -> object:
        packed.add(self.kv.kv_backend.name)
        return run(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Executor, "_run_packed", noted)
    found: dict[str, list[torch.Tensor]] = {}
    turbo.model.set_turbo(calibration=calibration, preset=preset, backend="triton")
    caches = [turbo.prefill(CONTEXTS), turbo.prefill(CONTEXTS[0])]
    for backend in ("triton", "torch"):
        turbo.model.set_turbo(calibration=calibration, preset=preset, backend=backend)
        outputs = [turbo.extend(cache, QUERIES) for cache in caches]
        found[backend] = [torch.where(x.attention_mask[..., None] != 0, x.hidden_states, 0).float() for x in outputs]
    assert packed == {Backend.TRITON}
    for ours, theirs in zip(*found.values(), strict=True):
        # States after the last norm are of size one; bfloat16 has eight bits.
        assert (ours - theirs).abs().max() <= (1e-3 if device == "cpu" else 0.15)
        assert (ours - theirs).norm() <= (1e-4 if device == "cpu" else 0.02) * theirs.norm()


def test_the_default_attention_is_one_that_packs(e1: TurboEsm) -> None:
    assert e1.model.config._attn_implementation == make_e1().config._attn_implementation == "sdpa"
