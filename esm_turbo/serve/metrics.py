"""What `/metrics` tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from esm_turbo import __version__

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one service, in a registry of their own.

    Args:
        info: labels of the metric `esm_turbo_info`, such as the model's name.
    """

    def __init__(self, info: dict[str, str] | None = None) -> None:
        self.registry = CollectorRegistry()
        labels = {"version": __version__} | (info or {})
        Gauge("esm_turbo_info", "What runs.", list(labels), registry=self.registry).labels(**labels).set(1)
        self._requests = Counter(
            "esm_turbo_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "esm_turbo_request_seconds", "Time to an answer.", ["endpoint"], buckets=_SECONDS, registry=self.registry
        )
        self._batches = Counter("esm_turbo_batches", "Batches run.", registry=self.registry)
        self._tokens = Counter("esm_turbo_tokens", "Tokens run.", registry=self.registry)
        self._busy = Counter("esm_turbo_busy_seconds", "Time in which batches ran.", registry=self.registry)
        self._shared = Counter("esm_turbo_batch_requests", "Requests in batches, summed.", registry=self.registry)
        self.queue = Gauge("esm_turbo_queue", "Requests that wait or run.", registry=self.registry)
        self.running = Gauge("esm_turbo_running", "Requests in the batch that runs.", registry=self.registry)
        self.stored = Gauge("esm_turbo_contexts_stored", "Contexts in the store.", registry=self.registry)
        self.derived = Gauge("esm_turbo_derived_bytes", "Memory of derived contexts.", registry=self.registry)

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(endpoint, str(status)).inc()
        self._latency.labels(endpoint).observe(seconds)

    def batch(self, tokens: int, requests: int, seconds: float) -> None:
        """Count a batch."""
        self._batches.inc()
        self._tokens.inc(tokens)
        self._shared.inc(requests)
        self._busy.inc(seconds)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)
