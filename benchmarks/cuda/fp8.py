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
from benchmarks.harness.measure import Case, Check, Figures, Target, ratios, timed
from benchmarks.harness.models import Architecture, described, random_calibration, random_sequences
from benchmarks.harness.names import BF16, FP8
from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.model.precision import quantize_products
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM

_TOLERANCE = 1.1
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
        # Cases that were measured still hold the mapping.
        models.clear()
        gc.collect()
        torch.cuda.empty_cache()


def _models(geometry: Geometry) -> dict[str, TurboEsm]:
    """A model in bfloat16, and a copy with eight-bit products that shares the rest of its weights."""
    turbo = random_model(geometry.build, geometry.tokenizer)
    model = turbo.model
    model.set_turbo(calibration=random_calibration(model.base_model, [DEFAULT_PRESET]), preset=DEFAULT_PRESET)
    reduced = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    quantize_products(reduced, [])
    models = {BF16: model, FP8: reduced}
    return {arm: TurboEsm(model.requires_grad_(False), turbo.tokenizer) for arm, model in models.items()}


@torch.no_grad()
def random_model(build: Callable[[], PreTrainedModel], tokenizer: str) -> TurboEsm:
    """A model of random weights in bfloat16, with the tokenizer of a small model."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(cuda_timing.DEVICE):
            model = build().eval()
    finally:
        torch.set_default_dtype(before)
    model.config._attn_implementation = "sdpa"
    _set_frequencies(model)
    for weight in model.base_model.parameters():
        if weight.dim() == 2:
            # Hidden states keep their size from layer to layer.
            weight.normal_(std=weight.shape[1] ** -0.5)
    small = TurboEsm.from_pretrained(SMALL_MODELS[tokenizer], calibration=False, device="cpu")
    return TurboEsm(model, small.tokenizer)


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
        known, context, peptides = self.proteins, self.context, self.peptides

        def extension(turbo: TurboEsm, rows: int) -> Callable[[], object]:
            return partial(turbo.extend, turbo.prefill(context), peptides[:rows])

        yield self._case(
            "embedding", "residues", sum(map(len, known)), lambda x: partial(x.embed, known, include=["mean"])
        )
        yield self._case(
            f"score 12-mers on {_CONTEXT}", "peptides", len(peptides), lambda x: partial(x.score, context, peptides)
        )
        yield self._case(f"prefill of {_CONTEXT}", "residues", _CONTEXT, lambda x: partial(x.prefill, context))
        for rows in (1, 64):
            yield self._case(f"extend by {rows}", "peptides", rows, partial(extension, rows=rows))
        yield self._case(
            f"all variants of {_CONTEXT}", "residues", _CONTEXT, lambda x: partial(x.score_variants, context)
        )
        yield self._case(
            "generate after 8 contexts", "residues", 64, lambda x: partial(x.generate, [context] * 8, max_new_tokens=8)
        )

    def _case(self, name: str, unit: str, count: int, call: Callable[[TurboEsm], Callable[[], object]]) -> Case:
        """A call of every model, of so many units."""
        shape = {**described(self.models[BF16].model), "preset": DEFAULT_PRESET}

        def measure(repeats: int) -> Figures:
            seconds = timed({arm: call(turbo) for arm, turbo in self.models.items()}, repeats)
            return {
                "seconds": seconds,
                "unit": unit,
                "per_second": {arm: count / seconds[arm]["p50"] for arm in self.models},
                "ratios": ratios(seconds, (BF16, FP8)),
                "weight_bytes": {arm: _bytes(turbo.model) for arm, turbo in self.models.items()},
                "context_bytes": self.models[BF16].prefill(self.context).nbytes,
            }

        least = self.geometry.speedups.get(name.split()[0])
        targets = [] if least is None else [Target(("ratios", f"{BF16} / {FP8}"), at_least=least)]
        case = f"{self.geometry.name.partition(',')[0]}: {name}"
        return Case(case, self.geometry.name, shape, self._check, measure, targets)

    @torch.no_grad()
    def _check(self) -> Check:
        """Fused kernels on packed rows may lose no more by eight bits than PyTorch's operations do."""
        if self.checked is None:
            batch = self.models[FP8].tokenizer(self.proteins[:3], padding=True, return_tensors="pt")
            ids, mask = batch.input_ids.to(cuda_timing.DEVICE), batch.attention_mask.to(cuda_timing.DEVICE)

            def error(lengths: list[int] | None) -> float:
                exact, reduced = (
                    self.models[arm].model.base_model(ids, mask, row_lengths=lengths).last_hidden_state[mask.bool()]
                    for arm in (BF16, FP8)
                )
                return float((reduced.float() - exact.float()).norm() / exact.float().norm())

            packed, plain = error(mask.sum(1).tolist()), error(None)
            what = "error of eight bits by fused kernels, over that by PyTorch's operations"
            self.checked = Check(what, packed / plain, _TOLERANCE)
        return self.checked


def _bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
