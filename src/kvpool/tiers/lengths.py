"""How much of a prompt can be brought up: the longest length at which every group has what the next token reads.

As the ledger has it: all blocks of a full group, of a window or chunk those that are still seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.plan import GroupPlan


def first_needed(group: GroupPlan, count: int, start: int) -> int:
    """Return the first block that must come for a length of `count` blocks, with `start` on the device.

    What a window or chunk does not see need not come; a group with sinks skips it only when those are on the device.
    """
    life, n = group.lifetime, group.tokens_per_block
    if life is None or reads_all(group) or -(-life.sink_tokens // n) > start:
        return start
    if life.window is not None:
        return max(start, max(0, count * n - life.window + 1) // n)
    chunk = life.chunk or 1
    return max(start, count * n // chunk * chunk // n)


def reads_all(group: GroupPlan) -> bool:
    """True for a group whose tokens are read for ever."""
    life = group.lifetime
    return life is None or (life.window is None and life.chunk is None)


def longest(groups: Sequence[GroupPlan], start: int, have: Sequence[Sequence[bool]]) -> int:
    """Return the longest length, in blocks, all of whose blocks from `start` on are there, in every group at once.

    Args:
        groups: Of the plan.
        start: Blocks on the device.
        have: By group and block.
    """
    length = min((_run(row, start) for g, row in zip(groups, have, strict=True) if reads_all(g)), default=len(have[0]))
    runs = [_runs(row, start) for row in have]
    for count in range(length, start, -1):
        if all(run[count - 1] >= count - first_needed(g, count, start) for g, run in zip(groups, runs, strict=True)):
            return count
    return start


def _run(have: Sequence[bool], start: int) -> int:
    """Return where the run of true values that begins at `start` ends."""
    end = start
    while end < len(have) and have[end]:
        end += 1
    return end


def _runs(have: Sequence[bool], start: int) -> list[int]:
    """Return, for each place, how many true values end there, counted from `start` on."""
    runs, length = [], 0
    for index, value in enumerate(have):
        length = length + 1 if value and index >= start else 0
        runs.append(length)
    return runs
