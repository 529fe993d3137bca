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
class DraftRows:
    """Rows of a step that compute draft tokens: `[first_row, first_row + num_rows)`."""

    sequence: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Onboard:
    """Fill `block` with what a tier below keeps under `key`, before the step reads it.

    Attributes:
        index: Position of the block in its sequence.
    """

    sequence: int
    group: int
    block: int
    index: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Evicted:
    """A block that left the tree; its memory holds the content until the step's copies and writes are made.

    Attributes:
        index: Position of the block in its sequences.
        uses: How often it was found again since it was filled.
        extras: What its key depends on besides tokens and parent: salt, adapter, media; empty for none.
    """

    group: int
    block: int
    key: bytes
    parent: bytes
    index: int
    priority: int
    uses: int
    token_ids: tuple[int, ...]
    extras: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Move one token from slot `src` to slot `dst`, in all planes and layers of a group."""

    group: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Resized:
    """What a resize reached.

    Attributes:
        num_blocks: Blocks committed now.
        moves: `(src, dst)` blocks to copy in one go before the next step.
        stopped_by: A pinned block that could not be moved, or None.
        evicted: What was dropped to get there.
    """

    num_blocks: int
    moves: tuple[tuple[int, int], ...]
    stopped_by: int | None
    evicted: tuple[Evicted, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """Keeps a prefix from being evicted until it is given to `unpin`."""

    id: int
    num_tokens: int


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
        drafts: Rows that compute draft tokens.
        onboards: To be filled from a tier below.
        evicted: What made room, when the ledger was asked to offer it.
    """

    step: int
    sequences: tuple[int, ...]
    total_tokens: int
    num_samples: int
    copies: tuple[BlockCopy, ...]
    admitted: tuple[Admission, ...]
    sampled: tuple[int, ...]
    drafts: tuple[DraftRows, ...] = ()
    onboards: tuple[Onboard, ...] = ()
    evicted: tuple[Evicted, ...] = ()

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
class SequenceStats:
    """Where the tokens of one sequence came from.

    Attributes:
        num_tokens: Tokens, computed or not.
        num_known: Leading ones whose ids are known.
        num_computed: Leading ones that are held.
        num_cached: Prompt tokens found at admission.
        num_partial: How many of them in a block that was not whole.
        num_missed: Prompt tokens not found.
        num_resumed: Tokens found again after a pause.
        admitted: False while it waits for its first step.
        paused: True between pause and resume.
    """

    num_tokens: int
    num_known: int
    num_computed: int
    num_cached: int
    num_partial: int
    num_missed: int
    num_resumed: int
    admitted: bool
    paused: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the ledger was made, and where its blocks are now.

    Attributes:
        hit_tokens: Prompt tokens found at admission.
        partial_tokens: How many of them in blocks that were not whole.
        missed_tokens: Prompt tokens not found.
        resumed_tokens: Tokens of paused sequences found again; they are no hits.
        onboarded_tokens: Hit tokens that came from a tier below.
        admitted: Sequences admitted.
        allocated_blocks: Blocks handed out.
        evicted_blocks: How many of them were cached before.
        copied_blocks: Blocks copied because they were shared.
        taken_blocks: Nodes taken out of the tree because nobody else used them.
        adopted_blocks: Blocks computed twice and replaced by the stored one.
        stored_blocks: Blocks made matchable.
        evicted_by_priority: Evicted blocks by the priority they had.
        num_sequences: Sequences open now.
        num_nodes: Nodes of the prefix tree now.
        bookkeeping_bytes: Memory of the ledger's own arrays, for all reserved blocks.
        groups: By group.
    """

    hit_tokens: int
    partial_tokens: int
    missed_tokens: int
    resumed_tokens: int
    onboarded_tokens: int
    admitted: int
    allocated_blocks: int
    evicted_blocks: int
    copied_blocks: int
    taken_blocks: int
    adopted_blocks: int
    stored_blocks: int
    evicted_by_priority: dict[int, int]
    num_sequences: int
    num_nodes: int
    bookkeeping_bytes: int
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
