"""Requests of a load, and what the library answers to each."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from esm_turbo import TurboEsm
from esm_turbo.config import TurboConfig
from esm_turbo.context_model import ContextModel
from esm_turbo.kv_cache import TurboKVCache
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.store.files import context_spec
from esm_turbo.store.flat import FlatContext

# Share of each kind in the load.
_KINDS = {"score": 12, "variants": 5, "embeddings": 2, "generate": 1}


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: `score`, `variants`, `embeddings` or `generate`.
        target: number of its protein.
        body: without the target.
    """

    kind: str
    target: int
    body: dict[str, Any]

    def path(self, keys: Sequence[str]) -> str:
        """The path of the request; `keys` are the ids of the proteins."""
        context = f"/v1/contexts/{keys[self.target]}"
        return {"score": f"{context}/score", "variants": f"{context}/variants"}.get(self.kind, f"/v1/{self.kind}")


def proteins(count: int, seed: int, shortest: int = 60, longest: int = 300) -> list[str]:
    """Random proteins: what they are does not matter for time, and little for rounding."""
    draw = random.Random(seed)
    return ["".join(draw.choices(STANDARD_RESIDUES, k=draw.randint(shortest, longest))) for _ in range(count)]


def asks(targets: Sequence[str], count: int, seed: int, model: str) -> list[Ask]:
    """Requests on these targets, in random order; the kinds have their shares."""
    draw = random.Random(seed)
    kinds = [kind for kind, share in _KINDS.items() for _ in range(share)]
    made = []
    for number in range(count):
        kind, target = kinds[number % len(kinds)], draw.randrange(len(targets))
        protein = targets[target]
        body: dict[str, Any]
        if kind == "score":
            length = draw.choice((6, 8, 10))
            candidates = ["".join(draw.choices(STANDARD_RESIDUES, k=length)) for _ in range(draw.randint(1, 12))]
            body = {"candidates": candidates, "log_probabilities": True}
        elif kind == "variants":
            places = draw.sample(range(len(protein)), draw.randint(1, min(40, len(protein))))
            body = {"variants": [f"{protein[i]}{i + 1}{draw.choice(STANDARD_RESIDUES)}" for i in sorted(places)]}
        elif kind == "embeddings":
            body = {"input": [protein, targets[draw.randrange(len(targets))]], "model": model}
        else:
            body = {"sequence": protein, "max_new_tokens": 4, "seed": draw.randrange(1000), "temperature": 0.0}
        made.append(Ask(kind, target, body))
    draw.shuffle(made)
    return made


class Library:
    """The same requests, each one call of the library, with its contexts resident."""

    def __init__(self, turbo: TurboEsm, targets: Sequence[str]) -> None:
        self.turbo, self.targets = turbo, targets
        self.contexts = _Resident()

    def values(self, ask: Ask) -> list[float]:
        """The numbers of the answer."""
        target, body = self.targets[ask.target], ask.body
        if ask.kind == "score":
            scores = self.turbo.score(target, body["candidates"], store=self.contexts).scores  # type: ignore[arg-type]
            return [value for one in scores for value in one.log_probabilities]
        if ask.kind == "variants":
            return self.turbo.score_variants(target, body["variants"], store=self.contexts).values  # type: ignore[arg-type]
        if ask.kind == "embeddings":
            embeddings = self.turbo.embed(body["input"], include=["mean"])
            means = [mean for one in embeddings for mean in (one.mean_representations or {}).values()]
            return [value for mean in means for value in mean.tolist()]
        made = self.turbo.generate(
            body["sequence"], max_new_tokens=body["max_new_tokens"], seed=body["seed"], temperature=body["temperature"]
        )
        return [*made.log_probs[0], *map(float, map(ord, made.new_residues[0]))]


class _Resident:
    """A `ContextSource` in memory."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[str, bytes], FlatContext] = {}

    def get_or_prefill(self, turbo: ContextModel, sequences: Sequence[str], /) -> TurboKVCache:
        raise NotImplementedError("no request reads a context of residues alone")

    def find(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], config: TurboConfig, /
    ) -> list[TurboKVCache | None]:
        found = [self._contexts.get((config.name, bytes(ids))) for ids in token_ids]
        return [None if one is None else one.clone().cache(context_spec(turbo, config)) for one in found]

    def keep(
        self, turbo: ContextModel, token_ids: Sequence[Sequence[int]], cache: TurboKVCache, config: TurboConfig, /
    ) -> None:
        for ids, one in zip(token_ids, cache.cut([len(ids) for ids in token_ids]), strict=True):
            self._contexts[config.name, bytes(ids)] = FlatContext.of(one)

    def get_or_compute(self, *_: object) -> TurboKVCache:
        raise NotImplementedError("requests share a way to look contexts up")


def answered(kind: str, answer: Any) -> list[float]:
    """The same numbers of an answer of the service."""
    if kind == "score":
        return [value for one in answer["candidates"] for value in one["log_probabilities"]]
    if kind == "variants":
        return [one["score"] for one in answer["variants"]]
    if kind == "embeddings":
        return [value for one in answer["data"] for value in one["embedding"]]
    [one] = answer["sequences"]
    return [*one["log_probs"], *map(float, map(ord, one["new_residues"]))]


def difference(kind: str, own: Sequence[float], theirs: Sequence[float]) -> tuple[float, bool]:
    """Largest absolute difference, infinite if their numbers differ; and whether other residues were generated.

    Of residues about as likely as each other rounding selects one, and what follows it is another protein's. Generated
    residues are therefore compared up to the first that differs, by their log-probabilities.
    """
    if len(own) != len(theirs):
        return math.inf, False
    if kind == "generate":
        half = len(own) // 2
        other = [i for i in range(half) if own[half + i] != theirs[half + i]]
        compared = other[0] + 1 if other else half
        return _largest(own[:compared], theirs[:compared]), bool(other)
    return _largest(own, theirs), False


def _largest(own: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(own, theirs, strict=True))
