"""Which variants of kernels the calls of a model launch: few, and all of them compiled ahead.

PyTorch computes the results here, while the launchers list what they would launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EsmTokenizer

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.codecs import ExactCodec, KVCodec, PackedContext
from esm_turbo.files.families import FAMILIES
from esm_turbo.model.executor import Executor
from esm_turbo.model.growth import Growth, StepKind
from esm_turbo.model.plan import ForwardPlan
from esm_turbo.model.static_cache import StaticKVCache
from esm_turbo.ops import (
    copies,
    decoded_attention,
    torch_ops,
    triton_attention,
    triton_encode,
    triton_encoder,
    triton_layer,
)
from esm_turbo.ops.backends import TritonBackend
from esm_turbo.ops.triton_launch import recorded
from esm_turbo.ops.variants import Variant
from esm_turbo.ops.warmup import Sizes, cache_variants, encoder_variants
from tests.helpers import torch_encoder
from tests.helpers.models import make_calibration, make_esmc

MakeModel = Callable[..., TurboEsmForMaskedLM]
CAPABILITY = 90
MOST_VARIANTS = 24
CPU = torch.device("cpu")
PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVVHSLAKWKRQ" * 3


def list_launches(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """From here on, what is launched by models with the Triton backend, which then also runs on the CPU."""
    variants: set[Variant] = set()

    def listing(launch: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with recorded(CAPABILITY) as found:
                launch(*args, **kwargs)
            variants.update(found)
            return compute(*args, **kwargs)

        return call

    def pays(query: Tensor, context: PackedContext, codec: KVCodec) -> bool:
        if isinstance(codec, ExactCodec):
            return True
        return decoded_attention._is_shared(context) and query.shape[0] * query.shape[2] >= 2048

    def past(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query.transpose(1, 2)).transpose(1, 2), torch.empty(query.shape[:3])

    def can_pack(self: Executor, plan: ForwardPlan) -> bool:
        return self.encoder.dtype == torch.bfloat16 and not {n for n, x in plan.options.items() if x} - {
            "return_dict", "use_cache", "output_hidden_states",
        }  # fmt: skip

    def copy_rows(sources: copies.ByteRows, targets: copies.ByteRows) -> None:
        copies.launch_copies(sources.table, targets.table, sources.words and targets.words)

    monkeypatch.setattr(TritonBackend, "obstacle", lambda self, device: None)
    for name, launch in (
        ("encode", triton_encode.encode),
        ("extend_attention", triton_attention.extend_attention),
        ("rotate", triton_layer.rotate),
        ("gelu", triton_layer.gelu),
    ):
        monkeypatch.setattr(TritonBackend, name, staticmethod(listing(launch, getattr(torch_ops, name))))
    for name in torch_encoder.__all__:
        compute = getattr(torch_encoder, name)
        launch = compute if name == "attend" else getattr(triton_encoder, name)
        monkeypatch.setattr(triton_encoder, name, listing(launch, compute))
    monkeypatch.setattr("esm_turbo.model.static_cache.copy_rows", listing(copy_rows, copies.copy_rows))
    monkeypatch.setattr(decoded_attention, "pays", pays)
    monkeypatch.setattr(decoded_attention, "_attend_masked", past)
    monkeypatch.setattr(Executor, "_can_pack", can_pack)
    return variants


def call_everything(turbo: TurboEsm) -> Iterator[str]:
    """Calls of all tasks, with many lengths, batches and numbers of candidates; yields what was called."""
    for length in (1, 15, 16, 31, 63, 64, 65, 130, 200):
        context = turbo.prefill(PROTEIN[:length])
        for rows, new in ((1, 1), (1, 2), (2, 3), (3, 1), (5, 12), (16, 1), (7, 17)):
            turbo.extend(context, [PROTEIN[row : row + new] for row in range(rows)])
        turbo.extend(context, "W", eos=False, refresh=0)
        turbo.extend(context, ["W", "MK"], refresh=0)
        turbo.extend(context, "MKT", append=True)
        turbo.extend(context, "W", append=True, eos=False, refresh=0)
    yield "prefill and extend"
    several = turbo.prefill([PROTEIN[:90], PROTEIN[:33], PROTEIN[5:77]])
    for new in (1, 2, 15, 16, 40):
        turbo.extend(several, [PROTEIN[:new]] * 3, refresh=new % 3)
    static = StaticKVCache.like(several, 128, 4)
    turbo.model(torch.randint(4, 24, (4, 8)), past_key_values=static)
    growth = Growth(turbo.model.base_model.executor, several, 4, 128, [StepKind(9, 1), StepKind(2, 1)])
    growth.capture(lambda run: run)
    growth.step(StepKind(9, 1))
    growth.step(StepKind(2, 1))
    yield "several contexts, as in a graph"
    turbo.score(PROTEIN[:100], [PROTEIN[i : i + 4 + i % 9] for i in range(20)])
    peptides = [PROTEIN[i : i + 12] for i in range(12)]
    turbo.score(turbo.prefill(PROTEIN[:70]), peptides, toks_per_batch=2**16)
    turbo.score(PROTEIN[:70], peptides, arm="frozen")
    yield "score"
    turbo.score_variants(PROTEIN[:60], ["M1A", "K2W:T3A"])
    yield "score_variants"
    turbo.generate(PROTEIN[:40], max_new_tokens=3)
    turbo.generate([PROTEIN[:40], PROTEIN[:22]], max_new_tokens=2, refresh=0)
    turbo.generate(PROTEIN[:30], positions=[3, 7], per_step=2)
    yield "generate"
    turbo.embed([PROTEIN[:n] for n in (5, 50, 70)], include=["mean"], return_cache=True)
    turbo.embed([PROTEIN[:200]], include=["mean"], window=100)
    yield "embed"


@pytest.mark.parametrize(
    ("preset", "dtype", "heads", "head_dim", "family"),
    [
        ("turbo3", torch.bfloat16, 20, 64, "esm"),
        ("turbo2", torch.float32, 4, 24, "esm"),
        ("paper", torch.bfloat16, 4, 16, "esm"),
        ("exact", torch.bfloat16, 4, 16, "esm"),
        ("exact", torch.float32, 4, 24, "esm"),
        ("turbo3", torch.bfloat16, 15, 64, "esmc"),
        ("turbo3", torch.bfloat16, 18, 64, "esmc"),
    ],
)
@torch.no_grad()
def test_calls_launch_few_variants_which_are_all_compiled_ahead(
    tiny_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    family: str,
) -> None:
    if family == "esmc":
        plain = make_esmc(heads=heads, head_dim=head_dim, layers=3)
        masked_lm = FAMILIES[family].load(FAMILIES[family].masked_lm)
        model = masked_lm.from_esm(plain, calibration=make_calibration(plain), preset=preset).to(dtype)
        tokenizer = FAMILIES[family].load_tokenizer()()
    else:
        model = tiny_model(preset=preset, heads=heads, head_dim=head_dim, layers=3).to(dtype)
        tokenizer = EsmTokenizer.from_pretrained(EMBEDDED_MODEL)
    encoder = model.base_model
    encoder.kv.backend = "triton"
    turbo = TurboEsm(model, tokenizer)
    sizes = Sizes(heads, head_dim, encoder.packed_operations)
    codec = encoder.codec(encoder.turbo_config)
    ahead = {
        *encoder_variants(sizes, dtype, CPU, CAPABILITY),
        *cache_variants(codec, sizes, dtype, CPU, CAPABILITY),
    }
    assert len(ahead) <= MOST_VARIANTS
    launched = list_launches(monkeypatch)
    for called in call_everything(turbo):
        assert launched
        assert not _unexpected(launched, ahead), called
    names = {variant.name for variant in launched}
    decoded = "attend_new" if dtype == torch.float32 else "attend_shared"
    assert names >= ({decoded} if preset == "exact" else {"encode_context", "attend_context", "merge"})


def _unexpected(launched: set[Variant], ahead: set[Variant]) -> list[str]:
    """How variants that were not compiled ahead differ from the closest ones that were."""
    found = []
    for variant in launched - ahead:
        others = [other for other in ahead if other.name == variant.name]
        differing = [
            {field: (x, y) for field, x, y in zip(Variant._fields, variant, other, strict=True) if x != y}
            for other in others
        ]
        found.append(f"{variant.name}: {min(differing, key=len, default={})}")
    return found
