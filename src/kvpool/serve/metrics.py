"""Prometheus metrics, in the names inference engines use."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvpool.engine import Answer, Engine

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one engine. `observe` runs on the engine's thread; `render` anywhere.

    Args:
        engine: Read when metrics are asked for; only plain attributes and the ledger's own counters.
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        r = self.registry
        self._finished = Counter("kvpool:request_finished", "Requests by how they ended", ["reason"], registry=r)
        self._prompt = Counter("kvpool:prompt_tokens", "Prompt tokens of finished requests", registry=r)
        self._cached = Counter("kvpool:prompt_tokens_cached", "Prompt tokens found in the prefix tree", registry=r)
        self._generated = Counter("kvpool:generation_tokens", "Tokens generated", registry=r)
        self._first = Histogram("kvpool:time_to_first_token_seconds", "From arrival", buckets=_SECONDS, registry=r)
        self._between = Histogram(
            "kvpool:time_per_output_token_seconds", "Mean of a request", buckets=_SECONDS, registry=r
        )
        self.registry.register(self)

    def observe(self, answer: Answer) -> None:
        """Count a finished request."""
        self._finished.labels(answer.finish_reason).inc()
        self._prompt.inc(answer.prompt_tokens)
        self._cached.inc(answer.cached_tokens)
        self._generated.inc(len(answer.token_ids))
        if answer.time_to_first_token_s is not None:
            self._first.observe(answer.time_to_first_token_s)
        if answer.time_between_tokens_s is not None:
            self._between.observe(answer.time_between_tokens_s)

    def collect(self) -> Iterator[Metric]:
        """Read the engine's state, for the registry."""
        stats, scheduler = self._engine.cache.stats(), self._engine.scheduler
        blocks = GaugeMetricFamily("kvpool:blocks", "Blocks by what they hold", labels=["group", "state"])
        for plan, group in zip(self._engine.cache.plan.groups, stats.groups, strict=True):
            for state in ("used", "cached", "free"):
                blocks.add_metric([plan.name, state], getattr(group, state))
        yield blocks
        gauges = {
            "num_requests_running": ("Requests in the batch", len(scheduler.running)),
            "num_requests_waiting": ("Requests in the queue", len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Used blocks of all, 0 to 1", stats.used / max(stats.committed, 1)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"kvpool:{name}", text, value)
        counters = {
            "prefix_cache_hits": ("Prompt tokens found at admission", stats.hit_tokens),
            "prefix_cache_queries": ("Prompt tokens looked for", stats.hit_tokens + stats.missed_tokens),
            "evicted_blocks": ("Cached blocks given to others", stats.evicted_blocks),
            "engine_steps": ("Forward passes", self._engine.timing.num_steps),
            "prefill_tokens_computed": ("Rows of prefill steps", self._engine.timing.prefill_tokens),
            "decode_tokens_computed": ("Rows of decode steps", self._engine.timing.decode_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"kvpool:{name}", text, value)

    def render(self) -> bytes:
        """Return the text Prometheus scrapes."""
        return generate_latest(self.registry)
