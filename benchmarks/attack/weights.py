"""Weights that change between calls: what was computed with the old ones is refused or computed again, never reused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.attack.commands import References, content, protein, turbo
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, command, faults, library
from esm_turbo import ContextStore

NOTICEABLE = 1e-4
"""Change of logits relative to the largest below which a change of weights is none."""


class _Adapted(nn.Module):
    """A linear layer with a low-rank adapter (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(torch.randn(4, base.in_features, generator=generator) / 8)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) / 8)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T


def change(rng: random.Random, model: nn.Module) -> str:
    """Change one random matrix or vector that keys and values depend on; returns what was done, in words."""
    layers = model.esm.encoder.layer
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and _decides(name, len(layers) - 1)
    ]
    name = rng.choice(names)
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    parameter: Tensor = getattr(owner, leaf)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    how = rng.choice(("data", "in place", "new parameter", "state dict", "adapter", "whole"))
    if how == "adapter" and not isinstance(owner, nn.Linear):
        how = "data"
    # Writes through `.data` leave no trace in counters; noticed are those of at least a 32nd of a tensor in a row.
    fewest = len(parameter) // 16 if how == "data" else 1
    start = rng.randrange(len(parameter) - fewest + 1)
    rows = slice(start, min(start + rng.choice((fewest, 4 * fewest, len(parameter))), len(parameter)))
    changed = parameter.detach().clone()
    changed[rows] = 0.0 if rng.random() < 0.3 else torch.randn(changed[rows].shape, generator=generator) * changed.std()
    if how == "data":
        parameter.data[rows] = changed[rows]
    elif how == "in place":
        with torch.no_grad():
            parameter.copy_(changed)
    elif how == "new parameter":
        setattr(owner, leaf, nn.Parameter(changed))
    elif how == "state dict":
        model.load_state_dict({name: changed}, strict=False)
    elif how == "whole":
        with torch.no_grad():
            parameter.mul_(1.5)
    else:
        above, _, last = owner_name.rpartition(".")
        setattr(model.get_submodule(above), last, _Adapted(owner, generator))
    return f"{how}, {name}[{rows.start}:{rows.stop}]"


def _decides(name: str, last: int) -> bool:
    """True if keys and values depend on a parameter."""
    if not name.startswith("esm.") or "position_embeddings" in name or "contact_head" in name:
        return False
    if name.startswith(f"esm.encoder.layer.{last}."):
        return any(part in name for part in (".key.", ".value.", "attention.LayerNorm"))
    return "emb_layer_norm_after" not in name


def changed(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Weights change after a cache was made or a store was filled."""
    folder.mkdir()
    what = rng.choice(("extend", "score", "store", "generate"))
    context, new = protein(rng, 10, 40), protein(rng, 2, 5)
    report = folder.parent / f"{folder.name}.said"
    turbo()

    def run() -> int:
        model = turbo()
        uses: dict[str, Callable[[], Tensor]] = {
            "extend": lambda: model.extend(cache, new).logits,
            "generate": lambda: model.extend(cache, new, refresh=0).logits,
            "score": lambda: torch.tensor([one.pseudo_perplexity for one in model.score(cache, [new]).scores]),
        }
        with ContextStore("store") as store:
            cache = store.get_or_prefill(model, context)
            uses["store"] = lambda: model.extend(store.get_or_prefill(model, context), new).logits
            uses[what]()
            report.write_text(change(rng, model.model))
            try:
                after = uses[what]()
            except ValueError:
                return 0
            cache = model.prefill(context)
            uses["store"] = uses["extend"]
            fresh = uses[what]()
        wrong = float((after - fresh).abs().max() / fresh.abs().max())
        report.write_text(f"{report.read_text()}; wrong by {wrong:.1e}")
        # Not `wrong > NOTICEABLE`: NaN is wrong, too.
        return 0 if wrong <= NOTICEABLE else OTHER_NUMBERS

    outcome = library(folder, run)
    said = f"{what} after a change ({report.read_text() if report.exists() else 'none'})"
    if outcome.code == OTHER_NUMBERS:
        return [Finding("reused", f"{said}: numbers of the old weights")]
    return [Finding(one.category, f"{said}: {one.what}") for one in faults(outcome)]


def embedded(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """Weights change between two runs of `embed` or `store` into one folder: the second refuses it or begins anew."""
    folder.mkdir()
    model = folder / "model"
    (folder / "proteins.fasta").write_text(f">one\n{protein(rng)}\n>two\n{protein(rng)}\n")
    name = rng.choice(("embed", "store"))
    arguments = [name, "proteins.fasta", "out", "--model", "model"] + (["--include", "mean"] if name == "embed" else [])
    report = folder.parent / f"{folder.name}.said"
    turbo()
    saved = library(folder, lambda: (turbo().save_pretrained(model), 0)[1])
    first = command(folder, arguments)

    def save() -> int:
        report.write_text(change(rng, turbo().model))
        turbo().save_pretrained("model")
        return 0

    changed = library(folder, save)
    if saved.code or first.code or changed.code:
        return [Finding("trial failed", (saved.err + first.err + changed.err).strip()[-200:])]
    if "adapter" in report.read_text():
        # It is no part of a folder that `save_pretrained` writes.
        return []
    again = command(folder, arguments)
    said = f"{name} after a change ({report.read_text()})"
    if again.code == 0:
        fresh = command(folder, ["fresh" if argument == "out" else argument for argument in arguments])
        if fresh.code == 0 and not _alike(folder / "out", folder / "fresh"):
            return [Finding("reused", f"{said}: results of the old weights")]
    return [Finding(one.category, f"{said}: {one.what}") for one in faults(again)]


def _alike(one: Path, other: Path) -> bool:
    """True if one folder has all results of the other."""
    found, expected = (
        {path.name: content(path) for path in folder.rglob("*") if path.suffix in (".pt", ".safetensors")}
        for folder in (one, other)
    )
    return all(found.get(name) == content for name, content in expected.items() if name != "store.safetensors")
