"""What no policy can beat: Belady's choice on prefix trees, and a cache without end. Knows no ledger."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Later than any request.
NEVER = 1 << 60


def block_chains(requests: Sequence[NDArray[np.int32]], tokens_per_block: int) -> list[list[int]]:
    """Name the whole blocks of every request: equal numbers for equal prefixes.

    Args:
        requests: Token ids of each, `[n]` int32.
        tokens_per_block: Tokens of a block; what is left over is not stored.
    """
    names: dict[tuple[int, bytes], int] = {}
    chains = []
    for tokens in requests:
        parent, chain = -1, []
        for i in range(0, len(tokens) - tokens_per_block + 1, tokens_per_block):
            parent = names.setdefault((parent, tokens[i : i + tokens_per_block].tobytes()), len(names))
            chain.append(parent)
        chains.append(chain)
    return chains


def infinite_hits(chains: Sequence[Sequence[int]]) -> list[int]:
    """Return the blocks each request would find if nothing were ever evicted."""
    seen: set[int] = set()
    hits = []
    for chain in chains:
        hits.append(next((i for i, b in enumerate(chain) if b not in seen), len(chain)))
        seen.update(chain)
    return hits


def optimum_hits(chains: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """Return the blocks each request finds when the leaf whose next use is farthest goes first.

    Source: Belady 1966, with the rule of prefix caches that a block is found only behind all blocks before it; so
    only leaves go. A request's own blocks are in use while it runs; requests run one after another.
    """
    upcoming = _next_uses(chains)
    parent: dict[int, int] = {}
    depth: dict[int, int] = {}
    children: dict[int, int] = {}
    next_use: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    cached: set[int] = set()
    hits = []
    for chain, uses in zip(chains, upcoming, strict=True):
        found = next((i for i, b in enumerate(chain) if b not in cached), len(chain))
        hits.append(found)
        running = set(chain)
        _evict(len(cached) + len(chain) - found - num_blocks, heap, cached, children, parent, next_use, running)
        for i in range(found, len(chain)):
            block = chain[i]
            parent[block], depth[block] = (chain[i - 1] if i else -1), i
            children[block] = 0
            cached.add(block)
            if i:
                children[chain[i - 1]] += 1
        for block, use in zip(chain, uses, strict=True):
            next_use[block] = use
            heapq.heappush(heap, (-use, -depth[block], block))
    return hits


def _next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    last: dict[int, int] = {}
    out: list[list[int]] = [[]] * len(chains)
    for i in range(len(chains) - 1, -1, -1):
        out[i] = [last.get(b, NEVER) for b in chains[i]]
        for b in chains[i]:
            last[b] = i
    return out


def _evict(
    count: int,
    heap: list[tuple[int, int, int]],
    cached: set[int],
    children: dict[int, int],
    parent: dict[int, int],
    next_use: dict[int, int],
    running: set[int],
) -> None:
    """Drop `count` leaves. A block that is no leaf now comes back into the heap when its last child goes."""
    kept = []
    while count > 0:
        entry = heapq.heappop(heap)
        block = entry[2]
        if block not in cached or children[block] or -entry[0] != next_use[block]:
            continue
        if block in running:
            kept.append(entry)
            continue
        cached.discard(block)
        count -= 1
        above = parent[block]
        if above >= 0:
            children[above] -= 1
            if children[above] == 0 and above in cached:
                heapq.heappush(heap, (-next_use[above], entry[1] + 1, above))
    for entry in kept:
        heapq.heappush(heap, entry)
