"""Arms: which one runs, what its context is stored as, and the log-probabilities that all of them read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import DEFAULT_PRESET, TurboConfig
from esm_turbo.tasks.common import forwards
from esm_turbo.tasks.common.forwards import (
    FROZEN,
    batch_tokens,
    default_arm,
    default_storage,
    log_probabilities,
    maybe_decode,
    prefill_ids,
    protein_tokens,
    resolve_arm,
    single_row,
)
from tests.helpers.models import CLS, EOS, MASK, random_ids

MakeModel = Callable[..., TurboEsmForMaskedLM]


@pytest.fixture(scope="module")
def compressed(turbo: TurboEsm, tiny_model: MakeModel) -> TurboEsm:
    """The small model under a compressing preset."""
    return TurboEsm(tiny_model(preset="turbo3"), turbo.tokenizer)


def test_the_default_without_a_calibration(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    bare = TurboEsm(tiny_model(), turbo.tokenizer)
    # A chosen preset decides: this one needs no calibration, the others say that they do.
    assert default_arm(bare) == "turbo"
    bare.model.set_turbo()
    assert default_arm(bare) == "frozen"
    assert resolve_arm(bare, None) == ("frozen", "exact")
    for preset in ("turbo2", DEFAULT_PRESET):
        bare.model.set_turbo(preset=preset)
        assert default_arm(bare) == "turbo"


def test_tasks_without_a_calibration(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    bare = TurboEsm(tiny_model(), turbo.tokenizer)
    target, masked = "MKTAYIAKQR", "MKTAYI<mask><mask>QR"
    tasks: list[Callable[[], object]] = [
        lambda: bare.score(target, ["ACD"]),
        lambda: bare.score_variants(target, ["M1A"]),
        lambda: bare.generate(target, max_new_tokens=2),
        lambda: bare.generate(masked),
        lambda: bare.generate_binders(target, 3),
    ]
    expected = [task() for task in tasks]
    bare.model.set_turbo()
    assert [task() for task in tasks[2:4]] == expected[2:4]
    assert [task().arm for task in (*tasks[:2], tasks[4])] == ["frozen"] * 3  # type: ignore[attr-defined]
    # What was not chosen is not written under its name.
    with pytest.raises(ValueError, match="preset 'turbo3' needs a calibration"):
        bare.prefill(target)
    bare.model.set_turbo(preset=DEFAULT_PRESET)
    for task in tasks:
        with pytest.raises(ValueError, match="preset 'turbo3' needs a calibration"):
            task()


def test_contexts_are_decoded_where_that_pays_and_fits(
    compressed: TurboEsm, exact: TurboEsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, frozen = compressed.prefill("MKTAYIAK"), exact.prefill("MKTAYIAK")
    assert maybe_decode(compressed, cache, 255) is cache
    decoded = maybe_decode(compressed, cache, 256)
    assert decoded.config == FROZEN
    assert decoded.lengths.tolist() == cache.lengths.tolist()
    assert maybe_decode(exact, frozen, 10**6) is frozen
    # 9 tokens of 2 layers, 4 heads and 16 components, keys and values in float32.
    needed = 9 * 2 * 4 * 16 * 2 * 4
    monkeypatch.setattr(forwards, "available_bytes", lambda device: 4 * needed)
    assert maybe_decode(compressed, cache, 256) is not cache
    monkeypatch.setattr(forwards, "available_bytes", lambda device: 4 * needed - 1)
    assert maybe_decode(compressed, cache, 256) is cache


def test_tokens_per_batch() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert batch_tokens(7, "full", cpu) == batch_tokens(7, "turbo", cuda) == 7
    # Few rows fill a batch of whole proteins, and a GPU takes more of anything.
    assert batch_tokens(None, "turbo", cpu) < batch_tokens(None, "full", cpu) < batch_tokens(None, "full", cuda)
    assert batch_tokens(None, "turbo", cuda) == batch_tokens(None, "full", cuda)
    with pytest.raises(ValueError, match="`toks_per_batch` must be an integer of at least 1, got 0"):
        batch_tokens(0, "full", cpu)


@pytest.mark.parametrize(
    ("device", "devices", "expected"),
    [
        ("cpu", None, 4096),
        ("mps", None, 4096),
        ("cuda", None, 16384),
        ("cuda:1", None, 16384),
        # The model of the process that starts a run lies on the CPU.
        ("cpu", "cuda:0 cuda:1", 16384),
        ("cpu", "cuda", 16384),
        ("cuda:0", "cpu", 4096),
        # Pieces that anyone may compute fit everyone.
        ("cpu", "cuda:0 cpu", 4096),
    ],
)
def test_tokens_per_batch_of_whole_proteins(device: str, devices: str | None, expected: int) -> None:
    turbo: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    assert protein_tokens(None, turbo, devices) == expected
    assert protein_tokens(7, turbo, devices) == 7
    with pytest.raises(ValueError, match="`toks_per_batch` must be an integer of at least 1, got 0"):
        protein_tokens(0, turbo, devices)


def test_a_context_holds_the_given_tokens_as_the_arm_stores_them(compressed: TurboEsm) -> None:
    ids = [CLS, 5, MASK, 6, EOS]
    frozen, turbo = (prefill_ids(compressed, ids, arm) for arm in ("frozen", "turbo"))
    assert (frozen.config, turbo.config) == (FROZEN, compressed.model.esm.turbo_config)
    assert single_row(frozen, "a target") == single_row(turbo, "a target") == ids
    with torch.no_grad():
        expected = compressed.model(torch.tensor([ids]), use_cache=True).past_key_values
    for mine, theirs in zip(turbo.layers, expected.layers, strict=True):
        assert all(torch.equal(mine.packed[name], tensor) for name, tensor in theirs.packed.items())


def test_log_probabilities_of_half_precision_are_float32(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    half = TurboEsm(tiny_model().bfloat16(), turbo.tokenizer)
    found = log_probabilities(half, random_ids([9])[0], torch.tensor([3]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.exp().sum(), torch.tensor(1.0), rtol=0, atol=1e-5)


def test_storage_is_chosen_for_one_thread() -> None:
    """Others that use the model meanwhile store under its own preset."""
    turbo = TurboEsm.from_pretrained(calibration=False, device="cpu")
    encoder = turbo.model.esm
    encoder.turbo_config = before = TurboConfig.from_preset("turbo2")
    with default_storage(turbo), ThreadPoolExecutor(1) as pool:
        assert turbo.prefill_within_call("MKTAYI").config.name == "exact"
        assert pool.submit(lambda: encoder.turbo_config).result(10) == before
        assert copy.deepcopy(encoder).turbo_config == before
    assert encoder.turbo_config == before
