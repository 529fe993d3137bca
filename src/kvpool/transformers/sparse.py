"""Sparse attention (DSA): the indexer's forward, with scores over the paged keys instead of a dense copy of them.

Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1: `I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvpool.transformers.bridge import Bridge

_PARTS = ("wq_b", "wk", "k_norm", "weights_proj", "index_topk", "qk_rope_head_dim")


def is_indexer(module: torch.nn.Module) -> bool:
    """Whether a module picks tokens for sparse attention in the way of DeepSeek."""
    return all(hasattr(module, part) for part in _PARTS)


def pick(
    bridge: Bridge,
    module: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *ignored: Any,
    **also_ignored: Any,
) -> torch.Tensor:
    """Stand in for an indexer's forward: store its keys, score them where they lie.

    Args:
        hidden_states: `[B, n, hidden]`.
        q_resid: `[B, n, q_lora_rank]`.
        position_embeddings: `(cos, sin)`.

    Returns:
        `[T, topk]` int64 slots of the step's rows, for the attention function.
    """
    owner = bridge.active
    assert owner is not None
    batch, columns, _ = hidden_states.shape
    q = module.wq_b(q_resid).view(batch, columns, module.n_heads, module.head_dim)
    k = module.k_norm(module.wk(hidden_states)).unsqueeze(2)  # [B, n, 1, Di]
    q, k = _rotate(module, q, k, position_embeddings)
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
    weights = weights * (module.n_heads**-0.5 * module.softmax_scale)  # relu(a * x) = a * relu(x)
    return owner.score(int(module.layer_idx), q, k, weights, int(module.index_topk))


def _rotate(
    module: Any, q: torch.Tensor, k: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first `qk_rope_head_dim` channels as the module's own file does."""
    names = inspect.unwrap(
        type(module).forward
    ).__code__.co_names  # which of its file's two rotations its forward calls
    home = vars(sys.modules[type(module).__module__])
    (rotation,) = (home[n] for n in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave") if n in names)
    rope = module.qk_rope_head_dim
    q_rope, k_rope = rotation(q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2)
    return torch.cat([q_rope, q[..., rope:]], -1), torch.cat([k_rope, k[..., rope:]], -1)
