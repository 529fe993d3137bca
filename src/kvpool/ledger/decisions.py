"""What the ledger decides, as plain data. Who carries it out is not its business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `src` to block `dst`, before anything of the step is written."""

    group: int
    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that this step matched and gave blocks to.

    Attributes:
        sequence: Its id.
        num_cached_tokens: Leading tokens found in the tree.
        num_partial_tokens: How many of them in a block that is not whole.
    """

    sequence: int
    num_cached_tokens: int
    num_partial_tokens: int


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What one step does.

    Attributes:
        step: Number of the step, ascending.
        sequences: Ids, in the order of the table rows.
        total_tokens: T, tokens computed.
        num_samples: Sequences whose last token is computed: rows of `last_rows`.
        copies: To be made before the first write.
        admitted: Sequences that were waiting until now.
        sampled: Ids of the sequences whose last token is computed, in the order of `last_rows`.
    """

    step: int
    sequences: tuple[int, ...]
    total_tokens: int
    num_samples: int
    copies: tuple[BlockCopy, ...]
    admitted: tuple[Admission, ...]
    sampled: tuple[int, ...]

    def copies_by_group(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield `(group, [(src, dst), ...])` for every group that has copies."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for copy in self.copies:
            groups.setdefault(copy.group, []).append((copy.src, copy.dst))
        yield from groups.items()


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one group; `used + cached + free == committed`."""

    used: int
    cached: int
    free: int
    committed: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the ledger was made, and where its blocks are now.

    Attributes:
        hit_tokens: Prompt tokens found at admission.
        partial_tokens: How many of them in blocks that were not whole.
        missed_tokens: Prompt tokens not found.
        admitted: Sequences admitted.
        allocated_blocks: Blocks handed out.
        evicted_blocks: How many of them were cached before.
        copied_blocks: Blocks copied because they were shared.
        taken_blocks: Nodes taken out of the tree because nobody else used them.
        adopted_blocks: Blocks computed twice and replaced by the stored one.
        stored_blocks: Blocks made matchable.
        num_sequences: Sequences open now.
        num_nodes: Nodes of the prefix tree now.
        groups: By group.
    """

    hit_tokens: int
    partial_tokens: int
    missed_tokens: int
    admitted: int
    allocated_blocks: int
    evicted_blocks: int
    copied_blocks: int
    taken_blocks: int
    adopted_blocks: int
    stored_blocks: int
    num_sequences: int
    num_nodes: int
    groups: tuple[GroupStats, ...]

    @property
    def used(self) -> int:
        """Blocks in use, over all groups."""
        return sum(g.used for g in self.groups)

    @property
    def cached(self) -> int:
        """Blocks nobody uses that can still be matched, over all groups."""
        return sum(g.cached for g in self.groups)

    @property
    def free(self) -> int:
        """Blocks that hold nothing, over all groups."""
        return sum(g.free for g in self.groups)

    @property
    def committed(self) -> int:
        """Blocks with memory behind them, over all groups."""
        return sum(g.committed for g in self.groups)
