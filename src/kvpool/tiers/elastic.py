"""Memory that moves between groups: each grows and shrinks at its end, while every address stays.

Knows the budget. The ledger says what leaves and what moves, the slabs commit and give back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvpool.backends.base import Backend
from kvpool.errors import OutOfBlocks, PlanError
from kvpool.ledger import Ledger
from kvpool.ledger.decisions import Evicted
from kvpool.plan import Plan
from kvpool.plan.budget import parse_bytes
from kvpool.pools import Pools

T = TypeVar("T")
#: Memory moves between groups in parts of the budget this small, where so much is free; else block by block.
PARTS = 64


@dataclass(frozen=True, slots=True)
class ResizeResult:
    """What a resize reached.

    Attributes:
        budget_bytes: What the groups may commit from now on: more than was asked for when blocks in use or pinned
            stopped a shrink.
        committed_bytes: What they commit.
        num_blocks: Blocks of each group.
        stopped_by: By group: a pinned block that could not move, and kept the group longer than asked.
        waiting: True when steps are open: nothing was done yet, and the resize happens as the last of them ends.
    """

    budget_bytes: int
    committed_bytes: int
    num_blocks: tuple[int, ...]
    stopped_by: dict[str, int]
    waiting: bool = False


class Elastic:
    """The sizes of a cache's groups.

    Args:
        plan: Reserved addresses, block sizes, the first sizes.
        ledger: Asked to resize between steps.
        pools: The slabs.
        backend: Copies blocks that move.
        save: Keeps what is evicted before its memory is used again.
        busy: Says whether a step is open; nothing moves then.

    Attributes:
        resized: What the last resize reached; None before the first.

    Invariants: committed bytes of all groups never exceed the budget; ledger and slabs agree on every group's blocks.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        pools: Pools,
        backend: Backend,
        save: Callable[[tuple[Evicted, ...]], None],
        busy: Callable[[], bool],
    ) -> None:
        self.plan = plan
        self.budget_bytes = plan.budget_bytes
        self.num_moved_blocks = 0
        self.resized: ResizeResult | None = None
        self._wanted_bytes: int | None = None
        self._ledger, self._pools, self._backend = ledger, pools, backend
        self._save, self._busy = save, busy

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group that have memory."""
        return tuple(slab.num_blocks for slab in self._pools.slabs)

    @property
    def committed_bytes(self) -> int:
        """Bytes with memory behind them, over all groups."""
        return sum(slab.committed_bytes for slab in self._pools.slabs)

    def resize(self, budget: int | str) -> ResizeResult:
        """Change the budget; every group keeps its share. With steps open, `settle` does it when they have ended.

        Raises:
            PlanError: No addresses were reserved for so much, or it holds no block of some group.
        """
        size = parse_bytes(budget)
        if size > self.plan.max_budget_bytes:
            raise PlanError(
                f"a budget of {size} bytes is above max_budget, {self.plan.max_budget_bytes}, for which addresses were"
                " reserved; give make_plan a larger max_budget"
            )
        least = sum(self._bytes(g, 1) for g in range(len(self.plan.groups)))
        if size < least:
            raise PlanError(f"a budget of {size} bytes holds no block of every group; give at least {least}")
        self._wanted_bytes = size
        self.settle()
        if self._wanted_bytes is None and self.resized is not None:
            return self.resized
        return ResizeResult(self.budget_bytes, self.committed_bytes, self.num_blocks, {}, waiting=True)

    def settle(self) -> None:
        """Carry out the last resize that was asked for, unless that is done or steps are open still."""
        if self._wanted_bytes is None or self._busy():
            return
        size, self._wanted_bytes = self._wanted_bytes, None
        targets = self._targets(size)
        stopped = {}
        for group, target in enumerate(targets):
            if target < self.num_blocks[group]:
                by = self._shrink(group, target)
                if by is not None:
                    stopped[self.plan.groups[group].name] = by
        self.budget_bytes = max(size, self.committed_bytes)
        for group, target in enumerate(targets):
            self._grow(group, target - self.num_blocks[group])
        self.resized = ResizeResult(self.budget_bytes, self.committed_bytes, self.num_blocks, stopped)

    def retry(self, work: Callable[[], T]) -> T:
        """Do something that takes blocks; where they are missing, move memory between groups and try again."""
        while True:
            try:
                return work()
            except OutOfBlocks as error:
                if not self._move_memory(error.missing):
                    raise

    def fits(self, items: list[tuple[int, int]]) -> int:
        """Return how many leading items a step would take, memory moved between groups where that helps.

        None beside an open step while a resize waits: with one always open, it would wait for ever.
        """
        if self._wanted_bytes is not None and self._busy():
            return 0
        while (count := self._ledger.fits(items)) < len(items):
            if not self._move_memory(self._ledger.missing(items)):
                break
        return count

    def _move_memory(self, missing: Sequence[int]) -> bool:
        """Let the groups grow that have too few blocks, if there is enough for all of them; says whether any did.

        Only what is to spare is taken, so that two groups never take one block from each other in turns; what a prompt
        matched may be evicted by it, and then more is missing than before, until it is not to be had.
        """
        short = {group: blocks for group, blocks in enumerate(missing) if blocks > 0}
        if not short or self._busy():
            return False
        spare = {group: min(-blocks, self.num_blocks[group] - 1) for group, blocks in enumerate(missing) if blocks < 0}
        need = sum(self._more_bytes(group, blocks) for group, blocks in short.items())
        have = self.budget_bytes - self.committed_bytes
        have += sum(blocks * self.plan.groups[group].bytes_per_block for group, blocks in spare.items())
        if need > have:
            return False
        grown = [self._make_room(group, blocks, spare) for group, blocks in short.items()]
        return any(grown)

    def _make_room(self, short: int, num_blocks: int, spare: dict[int, int]) -> bool:
        """Let a group grow: into what the budget has left, else by what other groups do not use or value least.

        Args:
            short: The group.
            num_blocks: More blocks it needs; it gets a part of the budget where others have that much free.
            spare: The most that each other group may give; lowered by what it gave.

        Returns:
            Whether it grew at all.
        """
        grown = self._grow(short, max(num_blocks, self._part(short)))
        while grown < num_blocks:
            giver = self._slackest(spare)
            if giver is None:
                break
            slack = self._ledger.stats().groups[giver]
            wanted = max(self._more_bytes(short, num_blocks - grown), self.plan.granule_bytes)
            give = -(-wanted // self.plan.groups[giver].bytes_per_block)
            give = max(give, min(self._part(giver), slack.free // 2))
            give = min(give, spare[giver])
            before = self.num_blocks[giver]
            self._shrink(giver, before - give)
            spare[giver] -= before - self.num_blocks[giver]
            more = self._grow(short, max(num_blocks - grown, self._part(short)))
            grown += more
            if not more and self.num_blocks[giver] == before:
                break
        return grown > 0

    def _part(self, group: int) -> int:
        """Blocks of a group that a small part of the budget is."""
        return max(1, self.budget_bytes // PARTS // self.plan.groups[group].bytes_per_block)

    def _more_bytes(self, group: int, num_blocks: int) -> int:
        now = self.num_blocks[group]
        return self._bytes(group, now + num_blocks) - self._bytes(group, now)

    def _slackest(self, spare: dict[int, int]) -> int | None:
        """The group with most bytes to spare that are free, else most that are only cached."""
        groups = self._ledger.stats().groups

        def slack(g: int) -> tuple[int, int]:
            free = min(groups[g].free, spare[g])
            size = self.plan.groups[g].bytes_per_block
            return free * size, min(groups[g].cached, spare[g] - free) * size

        best: int | None = max(spare, key=slack, default=None)
        return best if best is not None and any(slack(best)) else None

    def _targets(self, size: int) -> list[int]:
        """Blocks of each group for a budget, in the proportions they have now."""
        now = [self._bytes(g, n) for g, n in enumerate(self.num_blocks)]
        total = sum(now)
        targets = []
        for g, group in enumerate(self.plan.groups):
            blocks = min(max(size * now[g] // total // group.bytes_per_block, 1), group.num_blocks_reserved)
            while blocks > 1 and self._bytes(g, blocks) > size * now[g] // total:
                blocks -= 1
            targets.append(blocks)
        while sum(self._bytes(g, n) for g, n in enumerate(targets)) > size:
            largest = max(range(len(targets)), key=lambda g: self._bytes(g, targets[g]) * (targets[g] > 1))
            targets[largest] -= 1
        return targets

    def _bytes(self, group: int, num_blocks: int) -> int:
        return self.plan.groups[group].committed_bytes(num_blocks, self.plan.granule_bytes)

    def _grow(self, group: int, num_blocks: int) -> int:
        """Add up to so many blocks at the end, as far as budget and addresses go; returns how many."""
        now = self.num_blocks[group]
        room = self.budget_bytes - self.committed_bytes + self._bytes(group, now)
        more = min(num_blocks, self.plan.groups[group].num_blocks_reserved - now)
        while more > 0 and self._bytes(group, now + more) > room:
            more = min(more - 1, max(room // self.plan.groups[group].bytes_per_block - now, 0))
        if more <= 0:
            return 0
        self._pools.slabs[group].resize(now + more)
        self._ledger.resize(group, now + more)
        return more

    def _shrink(self, group: int, num_blocks: int) -> int | None:
        """Give blocks at the end back; returns the pinned block that stopped it, if one did."""
        done = self._ledger.resize(group, num_blocks)
        self._save(done.evicted)
        if done.moves:
            self._backend.copy(self._pools, group, list(done.moves))
            self.num_moved_blocks += len(done.moves)
        self._pools.slabs[group].resize(done.num_blocks)
        return done.stopped_by

    def check(self) -> None:
        """Verify that ledger and slabs agree and that the budget holds."""
        committed = [group.committed for group in self._ledger.stats().groups]
        if committed != list(self.num_blocks):
            raise PlanError(f"the ledger has {committed} blocks, the slabs {list(self.num_blocks)}")
        if self.committed_bytes > self.budget_bytes:
            raise PlanError(f"{self.committed_bytes} bytes are committed, above the budget of {self.budget_bytes}")
