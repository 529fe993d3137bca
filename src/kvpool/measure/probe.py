"""A cache that records what a model writes and attends with it in several formats at once. Knows no text.

It stands where a `KVCache` stands: the model runs on the first cache alone; the others get the same keys, values and
queries, so that the error of a layer is the format's own and not what earlier layers made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from kvpool.cache import KVCache
from kvpool.sequence import Sequence as CacheSequence
from kvpool.step import Step
from kvpool.transformers import PackedCache


@dataclass(slots=True)
class HeadErrors:
    """Sums over rows, by layer and KV head (`[H]` fp64 each).

    Attributes:
        squared: Of the difference of attention outputs.
        total: Of the outputs without loss.
    """

    squared: dict[int, torch.Tensor] = field(default_factory=dict)
    total: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, layer: int, exact: torch.Tensor, lossy: torch.Tensor, num_kv_heads: int) -> None:
        """Count one call.

        Args:
            layer: Model layer.
            exact: `[T, Q, Dv]`.
            lossy: `[T, Q, Dv]`.
            num_kv_heads: H; query heads of one KV head are counted together.
        """
        for table, x in ((self.squared, lossy.double() - exact.double()), (self.total, exact.double())):
            heads = x.square().sum((0, 2)).unflatten(0, (num_kv_heads, -1)).sum(1)  # type: ignore[no-untyped-call]
            table[layer] = table.get(layer, 0) + heads

    def relative(self) -> dict[int, torch.Tensor]:
        """Return the relative L2 error of every layer and KV head."""
        return {layer: (s / self.total[layer].clamp(min=1e-300)).sqrt() for layer, s in self.squared.items()}

    def by_layer(self) -> dict[int, float]:
        """Return the relative L2 error of every layer."""
        return {layer: float((s.sum() / self.total[layer].sum()).sqrt()) for layer, s in self.squared.items()}


class Probe:
    """The caches of one forward pass.

    Args:
        main: Runs the model.
        others: Shadow it.
        query_rows: Last rows whose queries are kept; None keeps all.
        compare: Attend with the others as well; without, they only store.
    """

    def __init__(
        self, main: KVCache, others: Sequence[KVCache] = (), query_rows: int | None = 64, *, compare: bool = True
    ) -> None:
        self.main = main
        self.others = tuple(others)
        self.compare = compare
        self.query_rows = query_rows
        self.steps: list[Step] = []
        self.errors = [HeadErrors() for _ in others]
        self.written: dict[int, dict[str, torch.Tensor]] = {}
        self.queries: dict[int, torch.Tensor] = {}
        self.scales: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.main, name)

    def write(
        self,
        layer: int,
        step: Step,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        **parts: torch.Tensor | None,
    ) -> None:
        """Write to all caches and keep the tensors."""
        self.main.write(layer, step, k, v, **parts)
        for cache, own in zip(self.others, self.steps, strict=True):
            cache.write(layer, own, k, v, **parts)
        given = {"k": k, "v": v, **parts}
        self.written[layer] = {name: x.detach().clone() for name, x in given.items() if x is not None}

    def attend(self, layer: int, step: Step, q: torch.Tensor, **options: Any) -> Any:
        """Attend on all caches, count the errors, and return the main cache's output."""
        exact = self.main.attend(layer, step, q, **options)
        assert isinstance(exact, torch.Tensor)
        if not self.compare:
            return exact
        heads = self.main.pools.part(layer, "v" if "v" in self.written[layer] else "latent").num_heads
        for cache, own, errors in zip(self.others, self.steps, self.errors, strict=True):
            lossy = cache.attend(layer, own, q, **options)
            assert isinstance(lossy, torch.Tensor)
            errors.add(layer, exact, lossy, heads)
        self.queries[layer] = (q if self.query_rows is None else q[-self.query_rows :]).detach().clone()
        scale = options.get("scale")
        self.scales[layer] = q.shape[-1] ** -0.5 if scale is None else float(scale)
        return exact

    def run(self, model: Any, tokens: torch.Tensor) -> list[CacheSequence]:
        """Run a model over tokens `[n]` in one step; return the sequences that hold them, one a cache."""
        caches = (self.main, *self.others)
        sequences = [c.sequence(tokens.tolist()) for c in caches]
        with ExitStack() as steps:
            opened = [
                steps.enter_context(c.step([(s, len(tokens))], commit=False))
                for c, s in zip(caches, sequences, strict=True)
            ]
            self.steps = opened[1:]
            PackedCache(cast(KVCache, self), model).forward(opened[0], rows=torch.tensor([0]))
        return sequences


def sample(model: Any, cache: KVCache, tokens: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    """Return what `KVCache.calibrate` takes: what every layer of a model writes, and asks, for these tokens.

    Args:
        model: Attends through kvpool.
        cache: In a plain format, with room for the tokens.
        tokens: `[n]` int64.
    """
    probe = Probe(cache, query_rows=None)
    for sequence in probe.run(model, tokens):
        sequence.release(keep=False)
    return {layer: {**kv, "q": probe.queries[layer]} for layer, kv in probe.written.items()}


def logit_noise(queries: torch.Tensor, exact: torch.Tensor, lossy: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the standard deviation of the error of attention logits, by KV head.

    What all keys of a query have in common cancels in the softmax and does not count.

    Args:
        queries: `[R, Q, D]`.
        exact: Keys as the model wrote them, `[n, H, D]`.
        lossy: Keys as they are read, `[n, H, D]`.
        scale: Factor on the logits.
    """
    group = queries.shape[1] // exact.shape[1]
    error = (lossy.float() - exact.float()).repeat_interleave(group, 1)
    logits = torch.einsum("rqd,nqd->qrn", queries.float(), error) * scale
    spread = (logits - logits.mean(-1, keepdim=True)).square().mean((1, 2))
    return spread.reshape(-1, group).mean(1).sqrt()


def outlier_ratio(keys: torch.Tensor) -> torch.Tensor:
    """Return, by head, how many times the largest channel's amax is the median channel's (`[n, H, D]` to `[H]`)."""
    amax = keys.float().abs().amax(0)
    return amax.amax(-1) / amax.median(-1).values.clamp(min=1e-30)
