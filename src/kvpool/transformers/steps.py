"""A transformers cache whose layers write into, and attend to, the open step of a `KVCache`."""

from __future__ import annotations

import inspect
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvpool.cache import KVCache
from kvpool.errors import KVError, SpecError, UnsupportedError
from kvpool.kinds import LatentKind
from kvpool.step import Step
from kvpool.transformers.bridge import Bridge, HostedCache, cache_argument
from kvpool.transformers.demanded import adapted, demanded_class
from kvpool.transformers.dense import DenseMap
from kvpool.transformers.layers import StateLayer, make_layer


class StepCache(HostedCache, Cache):
    """Runs forwards of a model on steps of a `KVCache`.

    Args:
        cache: The paged cache.
        model: A causal language model.
        gathers: Hand dense keys and values to the model's own attention, instead of attending to the pages.

    Invariants: `step` and `dense` are set exactly while a step is open.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance that passes for the class the model demands, if it demands one."""
        model = next((x for x in (*args, *kwargs.values()) if isinstance(x, PreTrainedModel)), None)
        demanded = None if model is None else demanded_class(model)
        return super().__new__(cls if demanded is None else adapted(cls, demanded))  # type: ignore[arg-type]

    def __init__(self, cache: KVCache, model: PreTrainedModel, *, gathers: bool = False) -> None:
        Cache.__init__(self, layers=[make_layer(self, i, spec) for i, spec in enumerate(cache.plan.spec.layers)])
        self.cache = cache
        self.model = model
        self.gathers = gathers
        self.bridge = Bridge.of(model)
        if not (gathers or self.bridge.can_attend):
            raise UnsupportedError(f"{type(model).__name__} does not call attention by name; use mode='gather'")
        self.bridge.users.add(self)
        self.step: Step | None = None
        self.dense: DenseMap | None = None
        self._states = tuple(layer for layer in self.layers if isinstance(layer, StateLayer))
        # Recurrent models run aligned columns without padding; of their layers only dense attention asks for more.
        self.needs_mask = not self._states or (gathers and not all(self.is_linear))
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        self._argument = cache_argument(model)
        spec, plan = cache.plan.spec.layers, cache.plan
        sources = [plan.source_layer(layer) for layer in range(len(spec))]
        self._latent = tuple(any(isinstance(kind, LatentKind) for kind in spec[source].kinds) for source in sources)
        self._windows = tuple(spec[source].lifetime.window for source in sources)
        self._stored: int | None = None  # the layer written last: the next attention call is its

    def _open(self) -> tuple[Step, DenseMap]:
        if self.step is None or self.dense is None or self.bridge.active is not self:
            raise KVError("no step is open: call generate, or the model itself (not a part of it), with this cache")
        return self.step, self.dense

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what a layer computed for the step's rows.

        Args:
            k: `[B, H, n, D]`, or the latent `[B, 1, n, rank]`.
            v: `[B, H, n, Dv]`, or the rope part `[B, 1, n, rope]`.

        Returns:
            What attention gets: the same, or all keys and values `[B, H, columns, D]` when this cache gathers.
        """
        step, dense = self._open()
        if self._latent[layer]:
            self.cache.write(layer, step, latent=dense.pack(k), rope=dense.pack(v))
        else:
            self.cache.write(layer, step, dense.pack(k), dense.pack(v))
        if self.gathers:
            return self._gather(layer, k, v)
        self._stored = layer
        return k, v

    def store_index(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Write indexer keys `[B, n, Di]` of the step's rows; return those of all columns, `[B, columns, Di]`."""
        step, dense = self._open()
        self.cache.write(layer, step, index=dense.pack(k[:, None]))
        return self._gather_index(layer, k)

    def score(self, layer: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int) -> torch.Tensor:
        """Write indexer keys and pick the tokens every row may see.

        Args:
            q: `[B, n, Hi, Di]` indexer queries.
            k: `[B, n, 1, Di]` indexer keys.
            weights: `[B, n, Hi]` factors of the heads.
            topk: Tokens wanted.

        Returns:
            `[T, topk]` int64 slots, -1 where a row sees fewer.
        """
        step, dense = self._open()
        self.cache.write(layer, step, index=dense.pack(k.transpose(1, 2)))
        packed = dense.pack(weights[:, None])[:, 0]
        return self.cache.score(layer, step, dense.pack(q.transpose(1, 2)), packed, topk)

    def load_states(self) -> None:
        """Give every recurrent layer the states the step starts from."""
        for layer in self._states:
            layer.load(self.model.dtype)

    def save_states(self, failed: bool) -> None:
        """Keep the states the step ends in, unless it failed."""
        for layer in self._states:
            if not failed:
                layer.save()
            layer.clear()

    def _gather(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedError(f"{type(self).__name__} does not gather")

    def _gather_index(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError(f"{type(self).__name__} does not gather")

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        window: int | None,
        indices: torch.Tensor | None,
    ) -> torch.Tensor:
        step, dense = self._open()
        # A layer that shares another's keys stores nothing before it attends.
        layer = int(module.layer_idx) if self._stored is None else self._stored  # type: ignore[arg-type]
        self._stored = None
        self._check_window(layer, window)
        columns = query.shape[2]
        if columns < dense.columns:  # a model that needs no logits but the last may skip layers that store nothing
            query = torch.nn.functional.pad(query, (0, 0, dense.columns - columns, 0))
        q = dense.pack(query)
        latent = self._latent[layer]
        if latent:
            q = absorb_query(module, q)
        out = self.cache.attend(layer, step, q, scale=scale, softcap=softcap, sinks=sinks, indices=indices)
        assert isinstance(out, torch.Tensor)
        return dense.unpack(expand_output(module, out) if latent else out)[:, -columns:]

    def _check_window(self, layer: int, window: int | None) -> None:
        planned = self._windows[layer]
        if window is None or planned == window:
            return
        if planned is not None or window < self.cache.plan.max_seq_len:
            raise SpecError(f"layer {layer} attends with a window of {window} tokens; the plan says {planned}")


def absorb_query(module: Any, q: torch.Tensor) -> torch.Tensor:
    """Turn MLA queries into the latent space: `[T, Q, nope + rope] -> [T, Q, rank + rope]`.

    `q_nope . (W_k latent) = (W_k^T q_nope) . latent`, so that scores come straight from the stored latents.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (absorbed projections).
    """
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    up = module.kv_b_proj.weight.view(q.shape[1], -1, rank)[:, :nope]  # [Q, nope, rank]
    latent = torch.bmm(q[..., :nope].transpose(0, 1), up).transpose(0, 1)  # [T, Q, rank]
    return torch.cat([latent, q[..., nope:]], -1)


def expand_output(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Turn attended latents into values: `[T, Q, rank] -> [T, Q, Dv]`."""
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    up = module.kv_b_proj.weight.view(out.shape[1], -1, rank)[:, nope:]  # [Q, Dv, rank]
    return torch.bmm(out.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)
