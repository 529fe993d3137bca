"""What a stored vector must hold: each element follows from the token's whole history, its layer, part and head.

Elements are integers in -128..127, which every plain codec stores exactly. A vector of another token, position,
prefix, salt, layer, part or head differs in nearly every element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def root(extras: object) -> int:
    """The history before the first token: what else decides whether two sequences may share."""
    return int.from_bytes(hashlib.blake2b(repr(extras).encode(), digest_size=8).digest(), "little")


def extend(links: list[int], first: int, tokens: Iterable[int]) -> None:
    """Append one link a token: 64 bits of the whole history up to and with it."""
    for token in tokens:
        parent = links[-1] if links else first
        links.append(int.from_bytes(hashlib.blake2b(b"%d,%d" % (parent, token), digest_size=8).digest(), "little"))


def vectors(links: Sequence[int], layer: int, part: str, num_heads: int, dim: int) -> torch.Tensor:
    """Return fp32 `[T, H, D]` for these tokens."""
    place = np.uint64(root((layer, part)))
    token = mix(np.asarray(links, dtype=np.uint64) ^ place)  # [T]
    head = mix(token[:, None] + np.arange(1, num_heads + 1, dtype=np.uint64) * _GOLDEN)  # [T, H]
    element = mix(head[..., None] + np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN)  # [T, H, D]
    return torch.from_numpy((element >> np.uint64(56)).astype(np.float32) - 128)
