"""Calls of the public API on a CUDA device, from strings to results, compared with Hugging Face's model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EsmForMaskedLM

from benchmarks.harness import cuda_timing
from benchmarks.harness.embedded import shipped_proteins
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, ratios, timed
from benchmarks.harness.models import Architecture, described, random_models
from esm_turbo import TurboEsm
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.proteins.batches import token_batches
from esm_turbo.proteins.fasta import STANDARD_RESIDUES

THEIRS = "Hugging Face's model"
# Hidden states after the last layer norm are of size one; bfloat16 has eight bits.
_TOLERANCE = 0.25


def call_cases(
    architecture: Architecture,
    residues: int,
    proteins: int,
    toks_per_batch: int,
    candidates: int,
    new_tokens: int,
) -> Iterator[Case]:
    """Calls of every task, with random weights in bfloat16.

    Args:
        architecture: of the model.
        residues: of the context.
        proteins: shipped proteins to embed, of at most 1,022 residues.
        toks_per_batch: padded tokens per batch of the embeddings.
        candidates: peptides of 12 residues to score.
        new_tokens: residues to generate.
    """
    if not cuda_timing.available():
        return
    model, turbo = random_models(architecture, DEFAULT_PRESET, cuda_timing.DEVICE, torch.bfloat16)
    known = [record.sequence for record in shipped_proteins() if len(record.sequence) <= 1022]
    calls = _Calls(architecture, model, turbo, "".join(known)[:residues])
    yield calls.prefill()
    yield from (calls.extend(1, at_most=4e-3), calls.extend(64, at_most=10e-3))
    yield from (calls.score(candidates), calls.variants())
    yield from (calls.generate(1, new_tokens, at_least=250), calls.generate(64, new_tokens, at_least=5000))
    yield from (calls.replace(1, new_tokens), calls.replace(8, new_tokens))
    yield calls.embed(known[:proteins], toks_per_batch)


class _Calls:
    """Cases of one model.

    Args:
        architecture: of the model.
        model: Hugging Face's.
        turbo: with the same weights.
        sequence: residues of the context.
    """

    def __init__(self, architecture: Architecture, model: EsmForMaskedLM, turbo: TurboEsm, sequence: str) -> None:
        self.architecture, self.model, self.turbo, self.sequence = architecture, model, turbo, sequence
        self.context = {"context_tokens": len(sequence) + 1, "preset": DEFAULT_PRESET}
        self.generator = random.Random(0)

    def prefill(self) -> Case:
        """A context, computed."""
        residues, name = len(self.sequence), "turbo.prefill"
        rows = sorted_batches(self.turbo, [self.sequence], residues + 1)
        return self._case(
            f"prefill of {residues}",
            self.context,
            lambda: check_hidden_states(self.model, self.turbo, rows[-1]),
            {name: lambda: self.turbo.prefill(self.sequence), THEIRS: partial(their_means, self.model.esm, rows)},
            ("residues", residues),
            [Target(("seconds", name, "p50"), at_most=9e-3)],
        )

    def embed(self, proteins: Sequence[str], toks_per_batch: int) -> Case:
        """Embeddings of many proteins, without and with their contexts."""
        residues, rows = sum(map(len, proteins)), sorted_batches(self.turbo, proteins, toks_per_batch)
        embed = partial(self.turbo.embed, proteins, toks_per_batch=toks_per_batch)
        mean, caches = "turbo.embed, mean", "turbo.embed, mean and caches"
        return self._case(
            f"embedding, batches of {toks_per_batch} tokens",
            {"proteins": len(proteins), "residues": residues, "toks_per_batch": toks_per_batch},
            lambda: check_hidden_states(self.model, self.turbo, rows[-1]),
            {
                mean: partial(embed, include=["mean"]),
                caches: partial(embed, include=["mean", "cache"]),
                THEIRS: partial(their_means, self.model.esm, rows),
            },
            ("residues", residues),
            [
                Target(("per_second", mean), at_least=250e3),
                Target(("ratios", f"{THEIRS} / {mean}"), at_least=1.7),
                Target(("ratios", f"{mean} / {caches}"), at_least=0.8),
            ],
        )

    def extend(self, rows: int, at_most: float) -> Case:
        """Extension of one context by peptides; also of another context in every call."""
        turbo, peptides = self.turbo, self._peptides(rows)
        context = turbo.prefill(self.sequence)
        others = itertools.cycle([turbo.prefill(self.sequence[index:]) for index in range(8)])
        ids = self._ids([self.sequence + peptide for peptide in peptides])

        def check() -> Check:
            found = [turbo.extend(context, peptides).hidden_states for _ in range(3)][-1]
            with without_graphs(turbo):
                expected = turbo.extend(context, peptides).hidden_states
            error = largest_difference(found, expected)
            return Check("hidden states by a graph against eager ones, largest difference", error, _TOLERANCE)

        name = "turbo.extend"
        return self._case(
            f"extend by {rows} peptide{'s' if rows > 1 else ''}",
            {**self.context, "rows": rows},
            check,
            {
                name: lambda: turbo.extend(context, peptides),
                f"{name}, another context each time": lambda: turbo.extend(next(others), peptides),
                THEIRS: lambda: self.model(ids).logits,
            },
            ("peptides", rows),
            [Target(("seconds", name, "p50"), at_most=at_most)],
        )

    def score(self, candidates: int) -> Case:
        """Scores of many peptides on one target."""
        turbo, peptides = self.turbo, self._peptides(candidates)
        few = peptides[:4]

        def check() -> Check:
            alone, among = (turbo.score(self.sequence, x).scores[: len(few)] for x in (few, peptides))
            pairs = zip(alone, among, strict=True)
            error = max(abs(a.mean_log_probability - b.mean_log_probability) for a, b in pairs)
            return Check("mean log-probabilities, few peptides against many, largest difference", error, _TOLERANCE)

        names = {arm: f"turbo.score, {arm}" for arm in ("turbo", "frozen")}
        return self._case(
            f"score {candidates:,} peptides",
            {**self.context, "rows": candidates},
            check,
            {name: partial(turbo.score, self.sequence, peptides, arm=arm) for arm, name in names.items()},
            ("peptides", candidates),
            [
                Target(("per_second", names["turbo"]), at_least=1250),
                Target(("ratios", f"{names['turbo']} / {names['frozen']}"), at_least=0.7),
            ],
        )

    def variants(self) -> Case:
        """Scores of all single substitutions."""
        turbo, residues = self.turbo, len(self.sequence)
        ids = self._ids([self.sequence])

        def check() -> Check:
            found = [turbo.score_variants(self.sequence).values for _ in range(3)][-1]
            with without_graphs(turbo):
                expected = turbo.score_variants(self.sequence).values
            error = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            return Check("scores by graphs against eager ones, largest difference", error, _TOLERANCE)

        @torch.no_grad()
        def masked_rows() -> None:
            for part in torch.arange(1, residues + 1, device=ids.device).split(64):
                rows = ids.repeat(len(part), 1).scatter(1, part[:, None], self.model.config.mask_token_id)
                states = self.model.esm(rows).last_hidden_state
                self.model.lm_head(states[torch.arange(len(part)), part]).float().log_softmax(-1).cpu()

        names = {arm: f"turbo.score_variants, {arm}" for arm in ("turbo", "frozen")}
        return self._case(
            f"score all variants of {residues} residues",
            {**self.context, "rows": residues},
            check,
            {
                **{name: partial(turbo.score_variants, self.sequence, arm=arm) for arm, name in names.items()},
                THEIRS: masked_rows,
            },
            ("residues", residues),
            [Target(("seconds", names["turbo"], "p50"), at_most=90e-3)],
        )

    def generate(self, rows: int, new_tokens: int, at_least: float) -> Case:
        """Residues generated after one context, left to right."""

        @torch.no_grad()
        def recomputed() -> None:
            ids = self._ids([self.sequence] * rows)
            for _ in range(new_tokens):
                drawn = self.model(ids).logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, drawn], dim=1)

        name = f"generate after {rows} context{'s' if rows > 1 else ''}"
        targets = [Target(("per_second", "turbo.generate"), at_least=at_least)]
        return self._generate(name, rows, new_tokens, {"max_new_tokens": new_tokens}, recomputed, targets)

    def replace(self, rows: int, new_tokens: int) -> Case:
        """Residues generated in the middle of the context, in random order."""
        begin = len(self.sequence) // 2

        @torch.no_grad()
        def recomputed() -> None:
            ids = self._ids([self.sequence] * rows)
            chosen = range(begin, begin + new_tokens)
            ids[:, list(chosen)] = self.model.config.mask_token_id
            for column in chosen:
                ids[:, column] = self.model(ids).logits[:, column].argmax(-1)

        name = f"generate in place in {rows} protein{'s' if rows > 1 else ''}"
        positions = list(range(begin, begin + new_tokens))
        return self._generate(name, rows, new_tokens, {"positions": positions}, recomputed, [])

    def _generate(
        self,
        case: str,
        rows: int,
        new_tokens: int,
        options: dict[str, Any],
        recomputed: Callable[[], None],
        targets: Sequence[Target],
    ) -> Case:
        turbo = self.turbo

        def check() -> Check:
            # The first calls are partly eager, whose rounding may draw others.
            *_, once, again = (turbo.generate([self.sequence] * rows, **options).sequences for _ in range(4))
            return Check("sequences that differ when generated twice", float(once != again), 0.0)

        name = "turbo.generate"
        return self._case(
            case,
            {**self.context, "rows": rows, "new_tokens": new_tokens},
            check,
            {
                name: partial(turbo.generate, [self.sequence] * rows, **options),
                THEIRS: recomputed,
            },
            ("residues", rows * new_tokens),
            targets,
        )

    def _case(
        self,
        name: str,
        shape: dict[str, Any],
        check: Callable[[], Check],
        arms: dict[str, Callable[[], object]],
        counted: tuple[str, int],
        targets: Sequence[Target],
    ) -> Case:
        unit, count = counted

        @torch.no_grad()
        def measure(repeats: int) -> Figures:
            seconds = timed(arms, repeats)
            first, *others = arms
            pairs = [*((first, arm) for arm in others), *((THEIRS, arm) for arm in arms if arm != THEIRS)]
            return {
                "seconds": seconds,
                "unit": unit,
                "per_second": {arm: count / seconds[arm]["p50"] for arm in arms},
                "ratios": ratios(seconds, *pairs),
            }

        return Case(name, self.architecture.name, {**described(self.turbo.model), **shape}, check, measure, targets)

    def _peptides(self, count: int) -> list[str]:
        return ["".join(self.generator.choices(STANDARD_RESIDUES, k=12)) for _ in range(count)]

    def _ids(self, sequences: Sequence[str]) -> Tensor:
        ids: Tensor = self.turbo.tokenizer(list(sequences), return_tensors="pt").input_ids
        return ids.to(self.model.device)


@contextmanager
def without_graphs(turbo: TurboEsm) -> Iterator[None]:
    """Calls within run eagerly."""
    turbo.model.esm.captures = False
    try:
        yield
    finally:
        turbo.model.esm.captures = True


Batch = tuple[Tensor, Tensor]
"""Token ids and attention mask, [batch, n] each."""


def sorted_batches(turbo: TurboEsm, sequences: Sequence[str], toks_per_batch: int) -> list[Batch]:
    """Proteins in padded batches of similar length, the longest first."""
    batches = token_batches([len(sequence) + 2 for sequence in sequences], toks_per_batch)[::-1]
    encoded = [
        turbo.tokenizer([sequences[index] for index in batch], padding=True, return_tensors="pt") for batch in batches
    ]
    return [(x.input_ids, x.attention_mask) for x in encoded]


def check_hidden_states(model: EsmForMaskedLM, turbo: TurboEsm, batch: Batch) -> Check:
    """Packed hidden states against those of Hugging Face's model."""
    input_ids, mask = (x.to(model.device) for x in batch)
    with torch.no_grad():
        theirs = model.esm(input_ids, mask).last_hidden_state
        packed = turbo.model.esm(input_ids, mask, row_lengths=mask.sum(1).tolist()).last_hidden_state
    error = largest_difference(packed[mask.bool()], theirs[mask.bool()])
    return Check("hidden states against Hugging Face's model, largest difference", error, _TOLERANCE)


@torch.no_grad()
def their_means(encoder: Callable[..., Any], batches: Sequence[Batch]) -> list[Tensor]:
    """Mean embeddings in a plain loop over an encoder of Hugging Face's, one copy to the host per batch."""
    means = []
    for input_ids, attention_mask in batches:
        input_ids, attention_mask = input_ids.to(cuda_timing.DEVICE), attention_mask.to(cuda_timing.DEVICE)
        states = encoder(input_ids, attention_mask).last_hidden_state.float()
        inside = attention_mask.roll(-1, 1)[..., None].float()
        inside[:, -1] = 0
        inside[:, 0] = 0
        means.append(((states * inside).sum(1) / inside.sum(1)).cpu())
    return means
