"""A model of tens of gigabytes, on one CUDA device and spread over all of them: calls of the public API, eager.

Weights are made where they lie, in bfloat16. Codecs are fitted to the first layers only, and stand for the others.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EsmTokenizer
from transformers.models.esm.modeling_esm import EsmRotaryEmbedding

from benchmarks.harness import cuda_timing
from benchmarks.harness.measure import Case, Check, Figures, interleave, spread, worst
from benchmarks.harness.models import Architecture, random_calibration, random_sequences
from esm_turbo import Calibration, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.config import DEFAULT_PRESET, Geometry, TurboConfig
from esm_turbo.files.fingerprint import attention_fingerprint, model_fingerprint
from esm_turbo.model.spread import finalize_dispatch, layer_devices, plan

PRESETS = ("exact", DEFAULT_PRESET)
# Of the norm of hidden states, by two paths in bfloat16. Rounding makes a few of several million differences large, an
# error makes all of them so.
_TOLERANCE = 0.1
_FITTED_LAYERS = 2


def large_cases(
    architecture: Architecture,
    contexts: Sequence[int],
    rows: Sequence[int],
    new_residues: int,
    candidates: int,
    devices: Sequence[Sequence[str]] | None = None,
) -> Iterator[Case]:
    """One case on one device, and one on all where there are several.

    Args:
        architecture: of a model of random weights.
        contexts: residues of the contexts that are prefilled; the first one is extended and scored on.
        rows: of the extensions.
        new_residues: of each row, and of each candidate.
        candidates: number of peptides to score.
        devices: of each case; None for the first CUDA device, and for all.
    """
    if not cuda_timing.available():
        return
    if devices is None:
        every = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = [every[:1], every] if len(every) > 1 else [every]
    for chosen in devices:
        turbo = _random_turbo(architecture, chosen)
        yield Case(
            name=f"{len(chosen)} device{'s' if len(chosen) > 1 else ''}",
            model=architecture.name,
            shape={
                **architecture.described(),
                "dtype": "bfloat16",
                "device": chosen[0],
                "devices": list(chosen),
                "layers_per_device": _per_device([(one, 1) for one in layer_devices(turbo.model.base_model)]),
                "context_residues": list(contexts),
                "rows": list(rows),
                "new_residues": new_residues,
                "candidates": candidates,
                "captured": False,
            },
            check=partial(_check, turbo, contexts[0], new_residues),
            measure=partial(_measure, turbo, contexts, rows, new_residues, candidates),
        )
        del turbo
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def _check(turbo: TurboEsm, residues: int, new_residues: int) -> Check:
    """Compare the kernels with PyTorch's path: of a prefill, and of an extension of the same context."""
    model = turbo.model.base_model
    [context] = random_sequences([residues], seed=1)
    new = random_sequences([new_residues] * 3, seed=2)
    model.set_turbo(calibration=model.calibration, preset=DEFAULT_PRESET)
    model.captures = False
    cache = turbo.prefill(context)
    ids = turbo.codes.batch([[turbo.codes.cls, *turbo.codes.encode(context, "context")]])[0].to(model.device)
    found = model(ids, row_lengths=[ids.shape[1]]).last_hidden_state, turbo.extend(cache, new).hidden_states
    model.set_turbo(calibration=model.calibration, preset=DEFAULT_PRESET, backend="torch")
    expected = model(ids).last_hidden_state, turbo.extend(cache, new).hidden_states
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]
    return Check("hidden states against PyTorch's path, part of their norm", worst(errors), _TOLERANCE)


@torch.no_grad()
def _measure(
    turbo: TurboEsm, contexts: Sequence[int], rows: Sequence[int], new_residues: int, candidates: int, repeats: int
) -> Figures:
    model = turbo.model.base_model
    sequences = random_sequences(contexts, seed=3)
    new = random_sequences([new_residues] * max(*rows, candidates), seed=4)
    on = sorted(set(layer_devices(model)), key=str)
    sizes: dict[str, Any] = {"weights": _per_device((x.device, x.nbytes) for x in turbo.model.parameters())}
    seconds: dict[str, list[float]] = {}
    for device in on:
        torch.cuda.reset_peak_memory_stats(device)
    for preset in PRESETS:
        model.set_turbo(calibration=model.calibration, preset=preset)
        model.captures = False
        caches = [turbo.prefill(sequence) for sequence in sequences]
        for residues, cache in zip(contexts, caches, strict=True):
            sizes[f"cache of {residues}, {preset}"] = _cache_bytes(cache)
        arms = {
            f"prefill {n}, {preset}": [partial(_finished, partial(turbo.prefill, sequence))]
            for n, sequence in zip(contexts, sequences, strict=True)
        }
        for count in rows:
            extend = partial(turbo.extend, caches[0], new[:count])
            arms[f"extend {count} x {new_residues}, {preset}"] = [partial(_finished, extend)]
        seconds |= interleave(arms, repeats)
    # The same for every preset but what is read.
    score = {"score": [partial(_finished, partial(turbo.score, sequences[0], new[:candidates]))]}
    seconds |= interleave(score, min(repeats, 2))
    found = spread(seconds)
    return {
        "seconds": found,
        "candidates_per_second": candidates / found["score"]["p50"],
        "bytes": sizes | {"peak": {str(device): torch.cuda.max_memory_allocated(device) for device in on}},
    }


def _finished(call: Any) -> None:
    call()
    # Outputs are on the first device, which waits for the others.
    torch.cuda.synchronize()


def _per_device(sizes: Any) -> dict[str, int]:
    totals: dict[str, int] = {}
    for device, size in sizes:
        totals[str(device)] = totals.get(str(device), 0) + size
    return totals


def _cache_bytes(cache: TurboKVCache) -> dict[str, int]:
    return _per_device((tensor.device, tensor.nbytes) for _, tensor in cache.named_tensors())


@torch.no_grad()
def _random_turbo(architecture: Architecture, devices: Sequence[str]) -> TurboEsm:
    """A model with its language-model head, its layers in equal parts on these devices."""
    model = _random_model(architecture, devices)
    small = _random_model(dataclasses.replace(architecture, num_layers=_FITTED_LAYERS), devices[:1])
    calibration = _repeated(random_calibration(small, [DEFAULT_PRESET]), model)
    model.set_turbo(calibration=calibration, preset=DEFAULT_PRESET)
    return TurboEsm(model, EsmTokenizer.from_pretrained(EMBEDDED_MODEL))


def _random_model(architecture: Architecture, devices: Sequence[str]) -> Any:
    """A model of random weights in bfloat16, made where they lie."""
    config = architecture.config()
    with torch.device("meta"):
        model = TurboEsmForMaskedLM(config).to(torch.bfloat16).eval()
    layers = architecture.num_layers
    parts = {f"esm.encoder.layer.{i}": devices[i * len(devices) // layers] for i in range(layers)}
    rest = ("esm.embeddings", "esm.encoder.emb_layer_norm_after", "esm.contact_head", "lm_head")
    # Products are then as large as those of 650M, and rounding does not grow with the width.
    std = 0.02 * (1280 / config.hidden_size) ** 0.5
    torch.manual_seed(0)
    for name, device in plan(model, parts | dict.fromkeys(rest, devices[0]), None, torch.bfloat16).items():
        part = model.get_submodule(name)
        part.to_empty(device=device)
        for own in part.modules():
            _fill(own, std)
    # Values that are no parameters.
    model.esm.rotary_embeddings.inv_freq = EsmRotaryEmbedding(config).inv_freq.to(devices[0])
    model.tie_weights()
    for layer in model.esm.encoder.layer:
        # With the default initialisation attention is nearly a plain mean, which would hide errors.
        layer.attention.self.query.weight *= 2
        layer.attention.self.key.weight *= 2
    finalize_dispatch(model)
    return model


def _fill(module: nn.Module, std: float) -> None:
    """Random weights; biases are zero, and norms change nothing."""
    if isinstance(module, nn.LayerNorm):
        module.weight.fill_(1)
        module.bias.zero_()
        return
    for name, parameter in module.named_parameters(recurse=False):
        parameter.normal_(std=std) if name == "weight" else parameter.zero_()
    for name, buffer in module.named_buffers(recurse=False):
        if name == "position_ids":
            buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device).expand_as(buffer))


def _repeated(calibration: Calibration, model: Any) -> Calibration:
    """A calibration of a model with fewer layers, whose codecs are repeated for a larger one's."""
    geometry = Geometry.of(model.config)
    times = -(-geometry.num_layers // calibration.geometry.num_layers)
    config = TurboConfig.from_preset(DEFAULT_PRESET)
    state: dict[str, Tensor] = {
        name: torch.cat([stack] * times)[: geometry.num_layers]
        for name, stack in calibration.codec(config).state.items()
    }
    weights = model_fingerprint(model.base_model)
    statistics = dataclasses.replace(calibration.statistics, geometry=geometry)
    fingerprint = attention_fingerprint(weights, geometry.num_layers)
    return Calibration(statistics, fingerprint, calibration.provenance, {config: state}, weights)
