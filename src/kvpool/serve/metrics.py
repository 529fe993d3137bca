"""Prometheus metrics, in the names inference engines use."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvpool.engine import Answer, Engine

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.01, 0.02, 0.05)


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
        self._waited = Histogram(
            "kvpool:request_queue_time_seconds", "From arrival to admission", buckets=_SECONDS, registry=r
        )
        self._preemptions = Counter("kvpool:num_preemptions", "Requests that gave their blocks back", registry=r)
        self._recomputed = Counter("kvpool:recomputed_tokens", "Rows that preemption cost", registry=r)
        self._scheduler = Histogram(
            "kvpool:scheduler_cpu_seconds",
            "CPU time of a step, without model and sampling",
            buckets=_STEP_SECONDS,
            registry=r,
        )
        engine.on_step = self._scheduler.observe
        self.registry.register(self)

    def observe(self, answer: Answer) -> None:
        """Count a finished request."""
        self._finished.labels(answer.finish_reason).inc()
        self._prompt.inc(answer.prompt_tokens)
        self._cached.inc(answer.cached_tokens)
        self._generated.inc(len(answer.token_ids))
        self._preemptions.inc(answer.num_preemptions)
        self._recomputed.inc(max(answer.recomputed_tokens, 0))
        if answer.waited_s is not None:
            self._waited.observe(answer.waited_s)
        if answer.time_to_first_token_s is not None:
            self._first.observe(answer.time_to_first_token_s)
        if answer.time_between_tokens_s is not None:
            self._between.observe(answer.time_between_tokens_s)

    def collect(self) -> Iterator[Metric]:
        """Read the engine's state, for the registry."""
        stats, scheduler, timing = self._engine.cache.stats(), self._engine.scheduler, self._engine.timing
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
            "forward_cpu_seconds": ("CPU time of the engine's thread in the model", timing.forward_s),
            "sampling_cpu_seconds": ("CPU time of the engine's thread for choosing tokens", timing.sampling_s),
            "engine_steps": ("Forward passes", timing.num_steps),
            "prefill_tokens_computed": ("Rows of prefill steps", timing.prefill_tokens),
            "decode_tokens_computed": ("Rows of decode steps", timing.decode_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"kvpool:{name}", text, value)

    def render(self) -> bytes:
        """Return the text Prometheus scrapes."""
        return generate_latest(self.registry)
