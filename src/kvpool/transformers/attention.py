"""The attention function transformers calls: it reads the paged cache, never the tensors it is handed.

The model's `Bridge` knows which cache the running forward belongs to; the module that calls leads to the bridge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpool.errors import UnsupportedError

if TYPE_CHECKING:
    from kvpool.transformers.bridge import Bridge

ATTENTION_NAME = "kvpool"
#: Attribute of a model and of its modules that leads to the bridge.
BRIDGE = "kvpool_bridge"


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
    sliding_window: int | None = None,
    indices: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the paged cache.

    Args:
        module: The attention module.
        query: `[B, Q, n, D]`.
        key: Ignored: it is in the cache already.
        value: Ignored.
        attention_mask: Ignored: padding and positions are the step's, windows and chunks the plan's.
        scaling: Factor on the logits.
        dropout: Must be 0.
        softcap: Cap on scaled logits.
        s_aux: `[Q]` learned sinks.
        sliding_window: What the model thinks the window is; checked against the plan.
        indices: Slots a row may see (sparse attention).
        position_bias: Must be None.

    Returns:
        (`[B, n, Q, Dv]`, None).

    Raises:
        UnsupportedError: No step of a kvpool cache is open, or the model asks for what the kernels do not do.
    """
    bridge: Bridge | None = getattr(module, BRIDGE, None)
    owner = bridge.active if bridge is not None else None
    if owner is None:
        raise UnsupportedError(
            f"{type(module).__name__} calls attention {ATTENTION_NAME!r} outside a forward with a kvpool cache; pass"
            " cache=PagedCache(model), or set another attn_implementation"
        )
    if dropout:
        raise UnsupportedError(f"attention dropout {dropout} is not supported; call model.eval()")
    if position_bias is not None:
        raise UnsupportedError(f"{type(module).__name__} adds a position bias, which no kernel does; use mode='gather'")
    if kwargs.get("is_causal") is False:
        raise UnsupportedError(f"{type(module).__name__} asks for attention that is not causal; use mode='gather'")
    return owner.attend(module, query, scaling, softcap, s_aux, sliding_window, indices), None


def no_mask(*args: Any, batch_size: int = 1, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask: the kernels derive it from positions and tables.

    Models with an indexer cut their mask to three axes before they hand it on, unread: they get one that can be cut.
    """
    return torch.empty((batch_size, 1, 0, 0)) if getattr(config, "index_topk", None) else None


def register_attention() -> str:
    """Register the attention and mask functions with transformers and return their name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
    return ATTENTION_NAME
