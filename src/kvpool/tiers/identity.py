"""What the bytes of a block depend on besides its tokens, as the named parts of an `Identity`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch

from kvpool._native import crc32c
from kvpool.plan import GroupPlan, Plan
from kvpool.pools.constants import Constants, fingerprint
from kvpool.tiers.base import Identity

#: Entries of a model's configuration that say where it came from or how it is run, not what it computes.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "_attn_implementation", "torch_dtype", "dtype", "use_cache")


def block_identity(
    plan: Plan, constants: Mapping[tuple[int, str], Constants], model: str, *, origin: str = ""
) -> Identity:
    """Return the identity of a cache's blocks.

    Args:
        plan: Its block format decides; codecs, layout and the like are named beside it, so that a mismatch can be read.
        constants: Of all parts; they must not change any more.
        model: A text that tells these weights from all others, such as `weights_identity` gives.
        origin: What the blocks were converted from; empty when they are as the model wrote them.
    """
    pools = [pool for group in plan.groups for pool in group.pools]
    return Identity(
        {
            "block_format": plan.block_format,
            "groups": "; ".join(f"{group.name} {len(group.layers)} layers {_shapes(group)}" for group in plan.groups),
            "codecs": " ".join(sorted({f"{'+'.join(pool.parts)}:{pool.codec}" for pool in pools})),
            "layout": " ".join(sorted({pool.layout for pool in pools})),
            "tokens_per_block": str(plan.tokens_per_block),
            "tp": f"{plan.tp_rank}/{plan.tp_size}",
            "constants": fingerprint(constants).hex(),
            "model": model,
        }
        | ({"converted_from": origin} if origin else {})
    )


def _shapes(group: GroupPlan) -> str:
    return " ".join(f"{'+'.join(pool.parts)}[{pool.num_heads}x{pool.vector.dim}]" for pool in group.pools)


def weights_identity(weights: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, object]) -> str:
    """Hash a model's weights and configuration: 10 GB/s, every byte of every tensor.

    Args:
        weights: Named tensors, as `named_parameters()` yields them.
        config: The model's configuration as plain data.
    """
    h = hashlib.sha256()
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    h.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        dense = tensor.detach().cpu().contiguous()
        size = dense.numel() * dense.element_size()
        h.update(f"{name} {dense.dtype} {tuple(dense.shape)} {crc32c(dense.data_ptr(), size):08x}\n".encode())
    return h.hexdigest()[:32]
