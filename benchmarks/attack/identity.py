"""A model changes between making contexts and using them: they are refused, or right, and never another model's."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import EsmForMaskedLM

from benchmarks.attack.commands import References, turbo
from benchmarks.attack.model_changes import CHANGES, UNSEEN_IN_MEMORY, adapt
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, about, library, library_faults
from benchmarks.harness.models import Architecture
from esm_turbo import ContextStore, EmbeddingRequest, TurboEsm, TurboEsmForMaskedLM, TurboKVCache, embed_records
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.tasks.embedding.files import read_entry

__all__ = ["changed", "keep", "outcomes", "small_model", "uses"]

PROTEIN, PEPTIDE = "MKTAYIAKQRQISFVK", "GSG<mask>"
RIGHT = 1e-3
"""Relative to the largest number."""
DTYPES = ("float32", "bfloat16", "float16")


def small_model(dtype: str, change: str = "") -> TurboEsm:
    """A small model of random weights, the same each time; with adapters if the change is one of theirs."""
    config = Architecture("small", num_layers=2, num_heads=4, head_dim=16, intermediate_size=64).config()
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = EsmForMaskedLM(config)
        for parameter in model.parameters():
            # Attention is far from uniform.
            scale = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn_like(parameter))
    model = TurboEsmForMaskedLM.from_esm(model, preset="exact").to(getattr(torch, dtype)).eval()
    if change.startswith("adapter_"):
        adapt(model)
    return TurboEsm(model, turbo().tokenizer)


def keep(model: TurboEsm, folder: Path) -> None:
    """Keep a saved cache, a store and embeddings of a model in a folder.

    Raises:
        ValueError: they cannot be kept.
    """
    model.prefill(PROTEIN).save(folder / "cache.safetensors")
    ContextStore(folder / "store").add(model, [PROTEIN])
    _embed(model, folder)


def _embed(model: TurboEsm, folder: Path) -> Tensor:
    records = [ProteinRecord("one", PROTEIN)]
    embed_records(model, records, folder / "embeddings", EmbeddingRequest.of(model, [-1], ["mean"]))
    arrays, _ = read_entry(folder / "embeddings" / "one.pt")
    return torch.cat([torch.as_tensor(array).float().flatten() for array in arrays.values()])


def uses(model: TurboEsm, folder: Path, cache: TurboKVCache | None = None) -> dict[str, Callable[[], Tensor]]:
    """Ways to use what `keep` has kept, and a cache in memory, by name."""

    def extended(make: Callable[[], TurboKVCache | None]) -> Tensor:
        context = make()
        if context is None:
            raise ValueError("there is none")
        return model.extend(context, PEPTIDE).logits

    saved = folder / "cache.safetensors"
    found = {
        "saved": partial(extended, lambda: TurboKVCache.load(saved)),
        "checked": partial(extended, lambda: TurboKVCache.load(saved, model=model.model)),
        "stored": partial(extended, lambda: ContextStore(folder / "store").get(model, PROTEIN)[0]),
        "held": partial(extended, lambda: ContextStore(folder / "store").hold(model, PROTEIN)),
        "embeddings": partial(_embed, model, folder),
    }
    # First, as the others look at all of the model.
    return found if cache is None else {"memory": partial(extended, lambda: cache)} | found


def outcomes(
    model: TurboEsm, folder: Path, fresh: Callable[[str], Tensor], cache: TurboKVCache | None = None
) -> dict[str, str]:
    """How uses of what is kept end, by name: `right`, the error of a refusal, or `wrong`.

    Args:
        model: as it is now.
        folder: of `keep`.
        fresh: computes what a use must give, without anything kept.
        cache: made before the model changed.
    """
    found = {}
    for name, use in uses(model, folder, cache).items():
        try:
            result = use()
        except ValueError as error:
            found[name] = f"refused: {error}"
            continue
        wanted = fresh(name)
        error = float((result - wanted).abs().max() / wanted.abs().max())
        # Not `error > RIGHT`: NaN is wrong, too.
        found[name] = "right" if error <= RIGHT else f"wrong by {error:.1e}"
    return found


def fresh_results(model: TurboEsm, name: str) -> Tensor:
    """What a use must give, computed by the model as it is, within one call."""
    if name == "embeddings":
        [protein] = model.embed([PROTEIN], include="mean")
        return torch.cat([one.float().flatten() for one in protein.mean_representations.values()])
    return model.extend(model.prefill_within_call(PROTEIN), PEPTIDE).logits


def run_change(name: str, dtype: str, folder: Path) -> dict[str, str]:
    """Outcomes of a change after `keep` of the model without it."""
    model = small_model(dtype, name)
    cache = None if name in UNSEEN_IN_MEMORY else model.prefill(PROTEIN)
    with ExitStack() as undo:
        CHANGES[name](model.model, undo)
        return outcomes(model, folder, partial(fresh_results, model), cache)


def run_undone(name: str, dtype: str, folder: Path) -> dict[str, str]:
    """Outcomes after `keep` of a changed model, of the model without the change; none if that keeps nothing."""
    changed_model = small_model(dtype, name)
    with ExitStack() as undo:
        CHANGES[name](changed_model.model, undo)
        try:
            keep(changed_model, folder)
        except ValueError as error:
            return {"kept": f"refused: {error}"}
    model = small_model(dtype, name)
    return outcomes(model, folder, partial(fresh_results, model))


def changed(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Contexts are kept, and the model changes; or they are kept of a changed model, and the change is undone."""
    folder.mkdir()
    name, dtype, undone = rng.choice(sorted(CHANGES)), rng.choice(DTYPES), rng.random() < 0.5
    turbo()

    def run() -> int:
        if undone:
            found = run_undone(name, dtype, folder)
        else:
            keep(small_model(dtype, name), folder)
            found = run_change(name, dtype, folder)
        wrong = [f"{use} {end}" for use, end in found.items() if end.startswith("wrong")]
        print(", ".join(wrong))
        return OTHER_NUMBERS if wrong else 0

    return about(f"{name}{' undone' if undone else ''} in {dtype}", library_faults(library(folder, run)))
