"""How much of a prompt can be had: the longest length at which every group has what the next token reads.

As the ledger has it: all blocks of a full group, of a window or chunk those that are still seen, of states the one at
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvpool.plan import GroupPlan


def needed(group: GroupPlan, count: int, tokens_per_block: int) -> tuple[range, range]:
    """Return the blocks of a group that a length of `count` blocks needs: the sinks, and those to the end."""
    life, n = group.lifetime, tokens_per_block
    if life is None:
        return range(0), range(max(count - 1, 0), count)
    first = 0
    if life.window is not None:
        first = max(0, count * n - life.window + 1) // n
    elif life.chunk is not None:
        first = count * n // life.chunk * life.chunk // n
    first = min(first, count)
    return range(min(-(-life.sink_tokens // n), first)), range(first, count)


def longest(
    groups: Sequence[GroupPlan], have: Sequence[Sequence[int]], tokens_per_block: int, *, above: int = 0
) -> int:
    """Return the longest length, in blocks, that every group has what it needs for; `above` where none is longer.

    Args:
        groups: Of the plan.
        have: By group and block, whether it is there.
        tokens_per_block: Of the plan.
        above: A length that is known to be had.
    """
    found = [list(accumulate(map(bool, row), initial=0)) for row in have]  # blocks there before each place

    def whole(counts: Sequence[int], blocks: range) -> bool:
        return counts[blocks.stop] - counts[blocks.start] == len(blocks)

    for count in range(len(have[0]), above, -1):
        if all(
            whole(counts, blocks)
            for group, counts in zip(groups, found, strict=True)
            for blocks in needed(group, count, tokens_per_block)
        ):
            return count
    return above
