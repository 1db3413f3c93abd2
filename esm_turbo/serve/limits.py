"""What one request, and all of them together, may ask for. Imports nothing, so `--help` stays fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the service.

    Attributes:
        residues: of a protein.
        candidates: per request.
        candidate_residues: of a candidate, or of a generated tail.
        variants: per request; the default holds all single substitutions of 1,022 residues.
        inputs: sequences per request for embeddings.
        samples: generated sequences per request.
        averaged: contexts of homologs that a request averages.
        tokens: that the model runs for one request, or for each context that it averages.
        contexts: in the store; further ones are refused.
        body_bytes: of a request.
        queue: requests that wait or run.
        seconds: from a request to its answer.
        connections: open at once.
    """

    residues: int = 1022
    candidates: int = 1000
    candidate_residues: int = 100
    variants: int = 20_000
    inputs: int = 256
    samples: int = 64
    averaged: int = 16
    tokens: int = 1_000_000
    contexts: int = 100_000
    body_bytes: int = 4 << 20
    queue: int = 256
    seconds: float = 120.0
    connections: int = 1024

    @property
    def items(self) -> int:
        """Values in a body, about, which are more than those of any request within the other limits."""
        return 2 * max(self.candidates, self.variants, self.inputs, 2 * self.residues) + 1000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"`{name}` must be above 0, got {value}")
