"""Long proteins in windows: accuracy against the full run, and memory and time at 35,000 residues."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from transformers import EsmForMaskedLM

from benchmarks.harness.embedded import embedded, evaluation_set, rounded
from benchmarks.harness.measure import Case, Check, Figures, Target, in_process, peak_resident
from benchmarks.harness.models import random_tokens
from esm_turbo import TurboEsm
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.evaluate.contexts import to_float64
from esm_turbo.evaluate.metrics import Outputs, TokenErrors
from esm_turbo.tasks.embedding.windows import Windows, embed_in_windows, iter_windows

_MODULE = "benchmarks.accuracy.long_proteins"
_SET = "long_human"
_CHECKED_RESIDUES = 200
# float32 summed in two orders; hidden states are of size one.
_TOLERANCE = 1e-4


def accuracy_cases(cuts: Sequence[Windows], presets: Sequence[str], max_proteins: int | None = None) -> Iterator[Case]:
    """Windows against the whole protein at once, on proteins of lengths that the model was trained for.

    Args:
        cuts: window settings.
        presets: of the memory; unused without a memory.
        max_proteins: use only the first N proteins; None for all.
    """
    for cut in cuts:
        for preset in presets if cut.memory else ["none"]:
            yield _accuracy_case(cut, preset, max_proteins)


def process_cases(cut: Windows, residues: Sequence[int]) -> Iterator[Case]:
    """Peak physical memory and time of fresh processes that embed one random protein each.

    Args:
        cut: window settings.
        residues: of each protein.
    """
    fewest, most = min(residues), max(residues)

    def measure(repeats: int) -> Figures:
        found = {n: in_process(_MODULE, n, cut.window, cut.overlap, cut.memory) for n in residues}
        peaks = {str(n): one["peak"] - one["output"] for n, one in found.items()}
        return {
            "bytes": {str(n): one for n, one in found.items()},
            "bytes_without_output": peaks,
            "residues_per_second": {str(n): n / one["seconds"] for n, one in found.items()},
            "growth": {"peak without the output": peaks[str(most)] / peaks[str(fewest)]},
        }

    yield Case(
        name=f"memory, {' and '.join(map(str, residues))} residues",
        model=EMBEDDED_MODEL.name,
        shape={"residues": list(residues), **dataclasses.asdict(cut), "preset": "turbo3", "dtype": "float32"},
        check=_check,
        measure=measure,
        targets=[Target(("growth", "peak without the output"), at_most=1.5)],
    )


def _accuracy_case(cut: Windows, preset: str, max_proteins: int | None) -> Case:
    @torch.no_grad()
    def measure(repeats: int) -> Figures:
        turbo = _turbo(preset)
        last = turbo.model.config.num_hidden_layers
        parts = []
        for record in evaluation_set(_SET, max_proteins):
            residues = turbo.codes.encode(record.sequence, record.id)
            found = torch.cat([states[last] for _, states, _ in iter_windows(turbo, residues, cut, [last])])
            full = turbo.model.esm(torch.tensor([[turbo.codes.cls, *residues, turbo.codes.eos]]))
            expected = full.last_hidden_state[0, 1:-1]
            pair = [Outputs(to_float64(x), to_float64(turbo.model.lm_head(x[None])[0])) for x in (expected, found)]
            parts.append(TokenErrors.compare(*pair))
        return rounded(
            {
                "proteins": f"{_SET}.fasta",
                "tested": len(parts),
                **dataclasses.asdict(cut),
                "preset": preset,
                "against_full": dataclasses.asdict(TokenErrors.join(parts).accuracy()),
            }
        )

    memory = f"{cut.memory} as {preset}" if cut.memory else "none"
    return Case(
        name=f"window {cut.window}, overlap {cut.overlap}, memory {memory}",
        model=EMBEDDED_MODEL.name,
        shape={"dtype": "float32", "max_proteins": max_proteins},
        check=_check,
        measure=measure,
    )


@functools.cache
def _turbo(preset: str) -> TurboEsm:
    """The embedded model with a memory of this preset; without a memory the preset is unused."""
    return embedded() if preset == "none" else TurboEsm.from_pretrained(preset=preset, device="cpu")


@functools.cache
@torch.no_grad()
def _check() -> Check:
    """Compare two windows, the second with the first in its memory, with Hugging Face's attention.

    With keys and values at full precision, the second window equals the output of the whole model if the hidden states
    of the first window replace those that the whole model would compute there.
    """
    turbo = _turbo("exact")
    residues = random_tokens(1, _CHECKED_RESIDUES, cls=False)[0]
    cut = Windows(_CHECKED_RESIDUES // 2, 0, _CHECKED_RESIDUES)
    last = turbo.model.config.num_hidden_layers
    layers = range(last + 1)
    windows = [
        {layer: torch.cat([cls_states[layer][None], states[layer]]) for layer in layers}
        for _, states, cls_states in iter_windows(turbo, residues.tolist(), cut, layers)
    ]
    model = EsmForMaskedLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32, attn_implementation="eager").eval().esm
    half = cut.window
    ids = torch.cat([residues.new_tensor([turbo.codes.cls]), residues, residues.new_tensor([turbo.codes.eos])])

    def first_window(layer: int, states: torch.Tensor) -> torch.Tensor:
        # The <cls> of the second window is the first token of the sequence.
        return torch.cat([states[:, :1], windows[0][layer][None, 1:], states[:, 1 + half :]], dim=1)

    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, layer=layer: (first_window(layer, args[0]), *args[1:]), with_kwargs=False
        )
        for layer, module in enumerate(model.encoder.layer)
    ]
    try:
        found = model(ids[None]).last_hidden_state[0]
    finally:
        for hook in hooks:
            hook.remove()
    error = float((found[1 + half : 1 + 2 * half] - windows[1][last][1:]).abs().max())
    what = "the second of two windows against Hugging Face's model given the first one's states, largest difference"
    return Check(what, error, _TOLERANCE)


def main(residues: int, window: int, overlap: int, memory: int) -> None:
    """Embed one random protein and print the peak memory of this process; run by `process_cases`."""
    turbo = embedded()
    loaded = peak_resident()
    ids = random_tokens(1, residues, cls=False)[0].tolist()
    cut = Windows(window, overlap, memory)
    begin = time.perf_counter()
    found = embed_in_windows(turbo, ids, cut, [turbo.model.config.num_hidden_layers], frozenset(["mean", "per_tok"]))
    seconds = time.perf_counter() - begin
    output = sum(x.nbytes for tensors in found.values() for x in tensors.values())
    print(json.dumps({"loaded": loaded, "peak": peak_resident(), "output": output, "seconds": seconds}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
