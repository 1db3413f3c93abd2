"""Planted outliers."""

from __future__ import annotations

import torch

from benchmarks.accuracy import components
from benchmarks.harness.embedded import embedded


def test_outliers_change_what_is_stored_and_nothing_else() -> None:
    turbo = embedded()
    planted = components.with_outliers(turbo.model, 60)
    ids = torch.tensor([[turbo.codes.cls, *turbo.codes.encode("MKTAYIAKQRQISFVKSHFSRQ", "it"), turbo.codes.eos]])
    with torch.no_grad():
        expected, found = (model(ids, torch.ones_like(ids)).logits for model in (turbo.model, planted))
        layers = [
            model(ids, torch.ones_like(ids), use_cache=True).past_key_values
            for model in map(exact, (turbo.model, planted))
        ]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for kind in ("keys", "values"):
        plain, loud = (cache.layers[3].packed[kind][0].abs().mean(1) for cache in layers)
        # Two of 64 channels of each head.
        assert ((loud / plain - 60).abs() < 0.1).sum(-1).tolist() == [2] * len(plain)
        assert ((loud / plain - 1).abs() < 0.01).sum(-1).tolist() == [62] * len(plain)


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that stores contexts as they are."""
    copied = components.with_outliers(model, 1)
    copied.set_turbo(preset="exact")
    return copied
