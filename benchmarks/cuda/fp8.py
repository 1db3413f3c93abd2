"""Calls with eight-bit products, compared with bfloat16, in the geometries of published models with random weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import EsmcConfig, PreTrainedModel

from benchmarks.harness import cuda_timing
from benchmarks.harness.embedded import SMALL_MODELS, shipped_proteins
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, finished, interleave, ratio, spread
from benchmarks.harness.models import Architecture, random_calibration, random_sequences
from benchmarks.harness.names import BF16, FEED_FORWARD, FP8
from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.model.precision import all_products, quantize_products
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM

# Both arms round tokens to eight bits, and neighbouring codes where they differ.
_TOLERANCE = 0.03
_CONTEXT = 500


@dataclass(frozen=True)
class Geometry:
    """Sizes of a published model, and what is asked of its calls.

    Attributes:
        name: of the model in records.
        build: makes the model, with any weights.
        tokenizer: a small model of the family.
        proteins: to embed.
        peptides: to score.
        speedups: least ratio of bfloat16 to fp8, by call.
    """

    name: str
    build: Callable[[], PreTrainedModel]
    tokenizer: str
    proteins: int
    peptides: int
    speedups: Mapping[str, float]


def esm2(architecture: Architecture) -> Callable[[], PreTrainedModel]:
    """Makes a model of ESM-2."""
    return lambda: TurboEsmForMaskedLM(architecture.config())


def esmc_6b() -> PreTrainedModel:
    """A model of ESM-C 6B, whose sizes are the library's defaults."""
    return TurboEsmcForMaskedLM(EsmcConfig())


def cases(geometries: Sequence[Geometry]) -> Iterator[Case]:
    """Calls of each geometry; its models are freed before the next."""
    if not cuda_timing.available():
        return
    for geometry in geometries:
        models = _models(geometry)
        yield from _Calls(geometry, models).cases()
        del models
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def _models(geometry: Geometry) -> dict[str, TurboEsm]:
    """A model in bfloat16, and copies with eight-bit products that share the rest of its weights."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(cuda_timing.DEVICE):
            model = geometry.build().eval()
    finally:
        torch.set_default_dtype(before)
    model.config._attn_implementation = "sdpa"
    _set_frequencies(model)
    for weight in model.base_model.parameters():
        if weight.dim() == 2:
            # Hidden states keep their size from layer to layer.
            weight.normal_(std=weight.shape[1] ** -0.5)
    model.set_turbo(calibration=random_calibration(model.base_model, [DEFAULT_PRESET]), preset=DEFAULT_PRESET)
    tokenizer = TurboEsm.from_pretrained(SMALL_MODELS[geometry.tokenizer], calibration=False, device="cpu").tokenizer
    models = {BF16: model}
    shared = {id(weight): weight for weight in model.parameters()}
    for arm, kept in ((FEED_FORWARD, ("qkv", "attention_out")), (FP8, ())):
        models[arm] = copy.deepcopy(model, dict(shared))
        quantize_products(models[arm], [product for product in all_products(model) if product[1] in kept])
    return {arm: TurboEsm(model.requires_grad_(False), tokenizer) for arm, model in models.items()}


def _set_frequencies(model: nn.Module) -> None:
    """Rotary frequencies in float32, which a model that is built in bfloat16 has rounded."""
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            count = module.inv_freq.numel()
            steps = torch.arange(count, device=cuda_timing.DEVICE, dtype=torch.float32) / count
            module.inv_freq = 10000.0**-steps


class _Calls:
    """Calls of models that differ in the precision of their products."""

    def __init__(self, geometry: Geometry, models: dict[str, TurboEsm]) -> None:
        self.geometry, self.models = geometry, models
        self.checked: Check | None = None
        known = [record.sequence for record in shipped_proteins() if len(record.sequence) <= 1022]
        self.proteins = known[: geometry.proteins]
        self.context = "".join(known)[:_CONTEXT]
        self.peptides = random_sequences([12] * geometry.peptides)

    def cases(self) -> Iterator[Case]:
        """One for each call."""
        embed = {arm: partial(turbo.embed, self.proteins, include=["mean"]) for arm, turbo in self.models.items()}
        yield self._case("embedding", embed, "residues", sum(map(len, self.proteins)))
        score = {arm: partial(turbo.score, self.context, self.peptides) for arm, turbo in self.models.items()}
        yield self._case(f"score 12-mers on {_CONTEXT}", score, "peptides", len(self.peptides))
        prefill = {arm: partial(turbo.prefill, self.context) for arm, turbo in self.models.items()}
        yield self._case(f"prefill of {_CONTEXT}", prefill, "residues", _CONTEXT)
        contexts = {arm: turbo.prefill(self.context) for arm, turbo in self.models.items()}
        for rows in (1, 64):
            extend = {
                arm: partial(turbo.extend, contexts[arm], self.peptides[:rows]) for arm, turbo in self.models.items()
            }
            yield self._case(f"extend by {rows}", extend, "peptides", rows)
        variants = {arm: partial(turbo.score_variants, self.context) for arm, turbo in self.models.items()}
        yield self._case(f"all variants of {_CONTEXT}", variants, "residues", _CONTEXT)
        generate = {
            arm: partial(turbo.generate, [self.context] * 8, max_new_tokens=8) for arm, turbo in self.models.items()
        }
        yield self._case("generate after 8 contexts", generate, "residues", 64)

    def _case(self, name: str, arms: dict[str, Callable[[], object]], unit: str, count: int) -> Case:
        geometry, encoder = self.geometry, self.models[BF16].model.base_model
        config = encoder.config
        shape = {
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "dtype": "bfloat16",
            "preset": DEFAULT_PRESET,
            "device": cuda_timing.DEVICE,
            "device_name": device_name(encoder.device),
        }

        def measure(repeats: int) -> Figures:
            seconds = spread(interleave({arm: [partial(finished, call)] for arm, call in arms.items()}, repeats))
            return {
                "seconds": seconds,
                "unit": unit,
                "per_second": {arm: count / seconds[arm]["p50"] for arm in arms},
                "ratios": {f"{BF16} / {arm}": ratio(seconds, BF16, arm) for arm in arms if arm != BF16},
                "weight_bytes": {arm: _bytes(turbo.model) for arm, turbo in self.models.items()},
                "context_bytes": self.models[BF16].prefill(self.context).nbytes,
            }

        least = geometry.speedups.get(name.split()[0])
        targets = [] if least is None else [Target(("ratios", f"{BF16} / {FP8}"), at_least=least)]
        case = f"{geometry.name.partition(',')[0]}: {name}"
        return Case(case, geometry.name, shape, self._check, measure, targets)

    @torch.no_grad()
    def _check(self) -> Check:
        """Packed rows of fused kernels against the library's forward, both in eight bits."""
        if self.checked is None:
            turbo = self.models[FP8]
            batch = turbo.tokenizer(self.proteins[:3], padding=True, return_tensors="pt").to(cuda_timing.DEVICE)
            mask = batch.attention_mask
            # After the first layers: small differences grow with depth in random weights.
            packed, plain = (
                turbo.model.base_model(batch.input_ids, mask, row_lengths=lengths, output_hidden_states=True)
                .hidden_states[2][mask.bool()]
                .float()
                for lengths in (mask.sum(1).tolist(), None)
            )
            error = float((packed - plain).norm() / plain.norm())
            self.checked = Check("hidden states after two layers, packed against plain, relative", error, _TOLERANCE)
        return self.checked


def _bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
