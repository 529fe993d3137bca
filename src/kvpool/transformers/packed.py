"""The packed forward: one row of tokens of many sequences, `input_ids = step.token_ids [1, T]`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvpool.cache import KVCache
from kvpool.errors import KVError, UnsupportedError
from kvpool.step import Step
from kvpool.transformers.dense import DenseMap
from kvpool.transformers.steps import StepCache


class PackedCache(StepCache):
    """Lets a transformers model run steps that somebody else opens and ends.

    Args:
        cache: The paged cache.
        model: A causal language model whose attention is called by name.
    """

    def __init__(self, cache: KVCache, model: PreTrainedModel) -> None:
        super().__init__(cache, model)
        if self._states:
            raise UnsupportedError(
                f"{type(model).__name__} keeps recurrent states, whose layers cannot tell packed sequences apart; use"
                " PagedCache(model)"
            )

    @torch.inference_mode()
    def forward(self, step: Step, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over the tokens of an open step.

        Args:
            step: The tokens.
            rows: `[n]` rows whose logits are wanted; `step.last_rows` by default.

        Returns:
            Logits `[n, vocabulary]`.
        """
        self.step, self.dense = step, DenseMap(1, step.total_tokens)
        try:
            output = self.model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None].long(),
                **{self._argument: self},
                use_cache=True,
                logits_to_keep=(step.last_rows if rows is None else rows).long(),
            )
        finally:
            self.abort()
        logits: torch.Tensor = output.logits[0]
        return logits

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are given, and no mask is made

    def prepare(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        raise KVError("PackedCache runs steps of its KVCache; for model.generate use PagedCache(model)")

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step is None:
            raise KVError("a packed forward runs inside PackedCache.forward")

    def after_forward(self, failed: bool) -> None:
        """Leave the step to whoever opened it."""

    def abort(self) -> None:
        self.step = self.dense = self._stored = None
