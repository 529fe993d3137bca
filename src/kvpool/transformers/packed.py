"""The packed forward: one row of tokens of many sequences, `input_ids = step.token_ids [1, T]`."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpool.cache import KVCache
from kvpool.errors import KVError
from kvpool.step import Step
from kvpool.transformers.attention import ATTENTION_NAME, KWARG


class PackedLayer(CacheLayerMixin):
    """One layer of `PackedCache`: writes what it is given into the step's slots."""

    is_sliding = False

    def __init__(self, owner: PackedCache, layer: int) -> None:
        super().__init__()
        self.owner = owner
        self.layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `k, v [1, H, T, D]` and hand the step to the attention function."""
        step = self.owner.step
        if step is None or kwargs is None:
            raise KVError(
                "a packed forward runs inside `PackedCache.forward`, on a model that passes kwargs to its cache"
            )
        self.owner.cache.write(self.layer, step, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        kwargs[KWARG] = (self.owner.cache, self.layer, step)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class PackedCache(Cache):
    """Lets a transformers model run steps of a `KVCache`.

    Args:
        cache: The paged cache.
        model: A causal language model; its attention implementation is set to kvpool's.
    """

    def __init__(self, cache: KVCache, model: Any) -> None:
        super().__init__(layers=[PackedLayer(self, layer) for layer in range(cache.plan.spec.num_layers)])
        self.cache = cache
        self.model = model
        self.step: Step | None = None

    @torch.inference_mode()
    def forward(self, step: Step, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over the tokens of an open step.

        Args:
            step: The tokens.
            rows: `[n]` rows whose logits are wanted; `step.last_rows` by default.

        Returns:
            Logits `[n, vocabulary]`.

        Raises:
            KVError: The model uses another attention implementation by now.
        """
        attention = self.model.config._attn_implementation
        if attention != ATTENTION_NAME:
            raise KVError(
                f"the model's attention is {attention!r}, which would read other sequences' rows; set it back with"
                f" model.set_attn_implementation({ATTENTION_NAME!r})"
            )
        self.step = step
        try:
            output = self.model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None].long(),
                cache=self,
                use_cache=True,
                logits_to_keep=(step.last_rows if rows is None else rows).long(),
            )
        finally:
            self.step = None
        logits: torch.Tensor = output.logits[0]
        return logits
