"""The order in which a tier gives blocks up: leaves only, lowest priority first, then least recently used."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from kvpool.errors import TierError
from kvpool.tiers.base import BlockId, Entry

_Rank = tuple[int, int]  # priority, and the count of uses at the last one


class EvictionOrder:
    """Priorities and recency of the blocks of one tier, and how many stored children each has.

    A block with stored children waits until they are gone, since they are worth nothing without it.

    Invariants: every block without stored children has an entry of its present rank in the heap; entries of other ranks
    are stale and skipped; `_children` counts stored children only.
    """

    def __init__(self) -> None:
        self._rank: dict[BlockId, _Rank] = {}
        self._parent: dict[BlockId, BlockId] = {}
        #: Also of blocks that are not stored themselves.
        self._children: dict[BlockId, int] = {}
        self._heap: list[tuple[int, int, BlockId]] = []
        self._uses = 0

    def __len__(self) -> int:
        return len(self._rank)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._rank)

    def add(self, entry: Entry) -> None:
        """Take a block in as the most recently used of its priority."""
        if entry.id in self._rank:
            self.touch(entry.id, entry.priority)
            return
        if entry.parent:
            self._parent[entry.id] = entry.parent_id
            self._children[entry.parent_id] = self._children.get(entry.parent_id, 0) + 1
        self._set_rank(entry.id, entry.priority)

    def touch(self, block: BlockId, priority: int = 0) -> None:
        """Make a block the most recently used; a higher priority than it had lifts it."""
        rank = self._rank.get(block)
        if rank is not None:
            self._set_rank(block, max(rank[0], priority))

    def remove(self, block: BlockId) -> None:
        """Forget a block; its parent may go next."""
        del self._rank[block]
        parent = self._parent.pop(block, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                self._push(parent)

    def victim(self, free: Callable[[BlockId], bool]) -> BlockId | None:
        """Return the block to give up first, or None when none may go; it stays until it is removed.

        Args:
            free: Says whether a block may go now; pinned ones may not.
        """
        pinned = []
        found = None
        while self._heap:
            priority, use, block = self._heap[0]
            if self._rank.get(block) == (priority, use) and block not in self._children:
                if free(block):
                    found = block
                    break
                pinned.append(self._heap[0])
            heapq.heappop(self._heap)
        for entry in pinned:
            heapq.heappush(self._heap, entry)
        return found

    def _set_rank(self, block: BlockId, priority: int) -> None:
        self._uses += 1
        self._rank[block] = (priority, self._uses)
        self._push(block)

    def _push(self, block: BlockId) -> None:
        """Give a block without stored children its place."""
        rank = self._rank.get(block)
        if rank is None or block in self._children:
            return
        heapq.heappush(self._heap, (*rank, block))
        if len(self._heap) > 4 * len(self._rank) + 64:  # mostly stale
            self._heap = [(*rank, b) for b, rank in self._rank.items() if b not in self._children]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Verify the invariants."""
        counts: dict[BlockId, int] = {}
        for block, parent in self._parent.items():
            if block not in self._rank:
                raise TierError(f"eviction order: {block} is gone and still counted as a child")
            counts[parent] = counts.get(parent, 0) + 1
        if counts != self._children:
            raise TierError("eviction order: counts of children are wrong")
        if not {(*rank, b) for b, rank in self._rank.items() if b not in self._children} <= set(self._heap):
            raise TierError("eviction order: a block without children cannot be found")
