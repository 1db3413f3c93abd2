"""Speed and memory of extending a context, compared with recomputing all tokens and with full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import EsmModel

from benchmarks.harness.measure import Case, Check, Figures, Target, interleave, ratio, spread, worst
from benchmarks.harness.models import Architecture, random_calibration, random_model, random_tokens, with_presets
from benchmarks.harness.names import COMPRESSED
from esm_turbo import TurboEsmModel, TurboKVCache
from esm_turbo.config import PRODUCT_PRESETS

# Hidden states after the last layer norm are of size one.
_TOLERANCE = 1e-4
_WHAT = "hidden states of the extension, backend torch against reference, largest difference over all presets"


def speed_cases(architecture: Architecture, context_tokens: int, new_tokens: int) -> Iterator[Case]:
    """Extension with every preset, and all tokens at once without a cache."""
    model = random_model(architecture)
    setup = _Setup(model, [context_tokens], new_tokens)
    whole = torch.cat([setup.contexts[context_tokens], setup.new], dim=1)

    @torch.no_grad()
    def measure(repeats: int) -> Figures:
        arms = {"recompute": [partial(model, whole)]}
        for preset in PRODUCT_PRESETS:
            arms[f"extend {preset}"] = [partial(setup.extend, preset, context_tokens)]
        seconds = spread(interleave(arms, repeats))
        ratios = {f"recompute / extend {p}": ratio(seconds, "recompute", f"extend {p}") for p in PRODUCT_PRESETS}
        for preset in COMPRESSED:
            ratios[f"extend {preset} / extend exact"] = ratio(seconds, f"extend {preset}", "extend exact")
        return {"seconds": seconds, "ratios": ratios}

    yield Case(
        name=f"{new_tokens} on {context_tokens}",
        model=architecture.name,
        shape=_shape(architecture) | {"context_tokens": context_tokens, "new_tokens": new_tokens},
        check=setup.check,
        measure=measure,
        targets=[Target(("ratios", f"recompute / extend {preset}"), at_least=10.0) for preset in PRODUCT_PRESETS]
        + [Target(("ratios", f"extend {preset} / extend exact"), at_most=1.75) for preset in COMPRESSED],
    )


class _Setup:
    """Contexts of random residues, cached with every preset."""

    def __init__(self, model: EsmModel, context_tokens: Sequence[int], new_tokens: int) -> None:
        calibration = random_calibration(model)
        self.models = with_presets(model, calibration, backend="torch")
        self.references = with_presets(model, calibration, backend="reference")
        self.new = random_tokens(1, new_tokens, cls=False, seed=2)
        self.contexts = {n: random_tokens(1, n - 1, seed=3) for n in context_tokens}
        with torch.no_grad():
            self.caches: dict[tuple[str, int], TurboKVCache] = {
                (preset, n): turbo(ids, use_cache=True).past_key_values
                for preset, turbo in self.models.items()
                for n, ids in self.contexts.items()
            }

    def extend(self, preset: str, context_tokens: int) -> Tensor:
        return self._extend(self.models[preset], preset, context_tokens)

    @torch.no_grad()
    def check(self) -> Check:
        errors = []
        for preset, n in self.caches:
            expected = self._extend(self.references[preset], preset, n)
            errors.append(float((self.extend(preset, n) - expected).abs().max()))
        return Check(_WHAT, worst(errors), _TOLERANCE)

    def _extend(self, model: TurboEsmModel, preset: str, context_tokens: int) -> Tensor:
        output: Tensor = model(self.new, past_key_values=self.caches[preset, context_tokens]).last_hidden_state
        return output


def _shape(architecture: Architecture) -> dict[str, object]:
    return {
        **architecture.described(),
        "intermediate_size": architecture.intermediate_size,
        "batch_size": 1,
        "dtype": "float32",
    }
