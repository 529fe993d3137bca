"""The attention function transformers calls: reads the paged cache, never the tensors it is handed.

A cache layer's `update` puts `(cache, layer, step)` into the keyword arguments that transformers passes on; here they
arrive under `KWARG`.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpool.cache import KVCache
from kvpool.errors import UnsupportedError
from kvpool.step import Step

ATTENTION_NAME = "kvpool"
KWARG = "kvpool_call"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the paged cache.

    Args:
        module: The attention module.
        query: `[1, Q, T, D]`, packed rows of all sequences.
        key: Ignored: it is in the cache already.
        value: Ignored.
        attention_mask: Ignored: positions and lifetimes are the step's and the plan's.
        scaling: Factor on the logits.
        dropout: Must be 0.
        softcap: Cap on scaled logits.
        s_aux: `[Q]` learned sinks.

    Returns:
        (`[1, T, Q, Dv]`, None).
    """
    call: tuple[KVCache, int, Step] | None = kwargs.get(KWARG)
    if call is None:
        raise UnsupportedError(
            f"{type(module).__name__} calls attention {ATTENTION_NAME!r} without a kvpool cache;"
            " pass cache=PagedCache(model)"
        )
    if dropout:
        raise UnsupportedError(f"attention dropout {dropout} is not supported; call model.eval()")
    cache, layer, step = call
    q = query[0].transpose(0, 1)  # [T, Q, D]
    out = cache.attend(layer, step, q, scale=scaling, softcap=softcap, sinks=s_aux)
    assert isinstance(out, torch.Tensor)
    return out[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the kernels derive it from positions."""
    return None


def register_attention() -> str:
    """Register the attention and mask functions with transformers and return their name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
    return ATTENTION_NAME
