"""Who is evicted first, as a key for each block: the smallest key goes first, and only blocks without children go.

A policy is a class with one method, called once a release with all its blocks. `lru` needs none of them: it is native.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Released:
    """Blocks that became unused together, deepest first.

    Attributes:
        group: Group of the plan.
        blocks: `[n]` int32, ids.
        uses: `[n]` int32, how often each was found again since it was filled.
        index: `[n]` int32, position in its sequence: tokens `[index * tokens_per_block, ...)`.
        priority: `[n]` int32, 0..100.
        names: `[n]` uint64, of the content: equal again after an eviction.
        keys: `[n]` float64, the key each had the last time; meaningless where `uses` is 0.
        now: Releases so far.
        capacity: Blocks of the group.
        tokens_per_block: Tokens of a block.
    """

    group: int
    blocks: NDArray[np.int32]
    uses: NDArray[np.int32]
    index: NDArray[np.int32]
    priority: NDArray[np.int32]
    names: NDArray[np.uint64]
    keys: NDArray[np.float64]
    now: int
    capacity: int
    tokens_per_block: int


class Policy(Protocol):
    """What a user's policy must have."""

    def keys(self, released: Released) -> NDArray[np.float64]:
        """Return one key a block; smaller goes first. A key stays until the block is used and released again."""
        ...


class LFU:
    """Least often found, then least recently. Without ageing: on changing traffic it freezes (docs/eviction.md)."""

    def keys(self, released: Released) -> NDArray[np.float64]:
        """Return `(uses, now)` as one number."""
        return released.uses.astype(np.float64) * 2.0**32 + released.now


class FIFO:
    """Oldest first, however often it was found."""

    def keys(self, released: Released) -> NDArray[np.float64]:
        """Return when each block was first released."""
        first = np.full(len(released.blocks), float(released.now))
        return np.where(released.uses == 0, first, released.keys)


class Turnover:
    """How many releases it takes to fill the group once: the unit in which a bonus is worth recency."""

    def __init__(self) -> None:
        self._blocks = 0
        self._calls = 0

    def __call__(self, released: Released) -> float:
        """Count a release and return the estimate."""
        self._blocks += len(released.blocks)
        self._calls += 1
        return released.capacity * self._calls / self._blocks


class Cost:
    """Recency plus what recomputing a block would cost: attention makes late blocks of long prompts dear.

    Args:
        crossover_tokens: Context length at which attention costs as much again as the rest of the layer.
        weight: Turnovers of recency that a cost of one is worth.
    """

    def __init__(self, crossover_tokens: int = 8192, weight: float = 1.0) -> None:
        self._crossover = crossover_tokens
        self._weight = weight
        self._turnover = Turnover()

    def keys(self, released: Released) -> NDArray[np.float64]:
        """Return the clock plus the weighted cost of one block."""
        cost = 1.0 + released.index.astype(np.float64) * (released.tokens_per_block / self._crossover)
        return released.now + cost * (self._weight * self._turnover(released))


class CountLRU:
    """Recency plus a bonus for having been found often, remembered beyond eviction for a bounded history.

    Source: own measurements, docs/eviction.md. `key = now + weight * turnover * log2(count)`.

    Args:
        weight: Turnovers of recency that doubling the count is worth.
        history: Names remembered, in multiples of the group's blocks.
    """

    def __init__(self, weight: float = 1.0, history: float = 4.0) -> None:
        self._weight = weight
        self._history = history
        self._counts: OrderedDict[int, int] = OrderedDict()
        self._turnover = Turnover()

    def keys(self, released: Released) -> NDArray[np.float64]:
        """Return the clock plus the weighted count."""
        counts = self._counts
        seen = np.empty(len(released.blocks))
        for i, name in enumerate(released.names.tolist()):
            seen[i] = counts[name] = counts.pop(name, 0) + 1
        for _ in range(len(counts) - int(self._history * released.capacity)):
            counts.popitem(last=False)
        bonus: NDArray[np.float64] = np.log2(seen) * (self._weight * self._turnover(released))
        return released.now + bonus


#: Name -> what makes one; None is the native order.
POLICIES: dict[str, Callable[[], Policy] | None] = {
    "lru": None,
    "priority+lru": None,
    "lfu": LFU,
    "fifo": FIFO,
    "cost": Cost,
    "count-lru": CountLRU,
}


def get_policy(policy: str | Policy) -> Policy | None:
    """Return the policy called so, the object itself, or None for the native order."""
    if not isinstance(policy, str):
        if not callable(getattr(policy, "keys", None)):
            raise TypeError(f"a policy needs a method keys(released), {type(policy).__name__} has none")
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)} or an object with keys(), got {policy!r}")
    make = POLICIES[policy]
    return None if make is None else make()
