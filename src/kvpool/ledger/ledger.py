"""The ledger's face: sequences in, decisions out. The core is native; what is parsed or named is done here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpool import _native
from kvpool.errors import KVError
from kvpool.ledger.arrays import StepArrays
from kvpool.ledger.decisions import Admission, BlockCopy, GroupStats, Stats, StepDecision
from kvpool.ledger.extras import Extra, Media, encode
from kvpool.ledger.retention import Retention, encode_ranges

if TYPE_CHECKING:
    from kvpool.plan import GroupPlan, Plan

#: No cap on a match.
UNLIMITED = 2**62
Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | Iterable[int]


class Ledger:
    """Which blocks belong to which sequence, which prefix is shared, and what is evicted.

    Works alone (a scheduler process without pools): it decides and returns decisions; who owns the memory carries
    them out. One thread opens steps; any thread may call anything else.

    Args:
        plan: Groups and limits.
        clock: Seconds, monotonic; retention durations are measured with it.
        policy: Who goes first when there is no free block: `lru`.

    Invariants: `used + cached + free == committed` for every group; `check()` verifies this and all others.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: str = "lru",
        finder_bits: int = 64,
        portable_sha: bool = False,
    ) -> None:
        if policy != "lru":
            raise ValueError(f"policy must be 'lru', got {policy!r}")
        self.plan = plan
        self._clock = clock
        limits = [
            plan.max_sequences,
            plan.max_step_tokens,
            plan.max_seq_len,
            plan.num_draft,
            plan.checkpoint_interval,
        ]
        mask = ((1 << finder_bits) - 1) << (64 - finder_bits)
        self._core = _native.Ledger([_group(g) for g in plan.groups], limits, mask, portable_sha)

    # --- sequences ------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: Tokens,
        *,
        salt: Extra = None,
        lora_id: Extra = None,
        media: Sequence[Media] = (),
        retention: Sequence[Retention] = (),
        max_cached_tokens: int | None = None,
    ) -> int:
        """Register a prompt and return its sequence id; nothing is matched or held yet.

        Args:
            tokens: Ids, 0..2^31-1: a list, an int32 or int64 array, or any iterable of ints.
            salt: Only sequences with the same salt share blocks; derive it from who asks, not from what they send.
            lora_id: Adapter; identity is the caller's: two adapters with one name need two ids.
            media: Media items inside the prompt.
            retention: Priorities of token ranges after release.
            max_cached_tokens: Match at most so many tokens.

        Raises:
            OutOfBlocks: The prompt can never fit.
        """
        return self._core.open(
            tokens if isinstance(tokens, (list, np.ndarray)) else list(tokens),
            encode(salt),
            encode(lora_id),
            [(m.start, m.start + m.num_tokens, encode(m.key)) for m in media] if media else [],
            encode_ranges(retention) if retention else [],
            UNLIMITED if max_cached_tokens is None else max_cached_tokens,
        )

    def extend(self, sequences: StepDecision | Sequence[int] | NDArray[np.int64], token_ids: Tokens) -> None:
        """Append one known token to each of `sequences`; they are not computed yet.

        Args:
            sequences: Ids; or a decision, for the sequences it has samples for.
            token_ids: One id a sequence.
        """
        ids = sequences.sampled if isinstance(sequences, StepDecision) else sequences
        tokens = token_ids if isinstance(token_ids, (list, np.ndarray)) else list(token_ids)
        self._core.extend(np.asarray(ids, np.int64), tokens)

    def append(self, sequence: int, token_ids: Tokens) -> None:
        """Append known tokens to one sequence; they are not computed yet."""
        self._core.append(sequence, token_ids if isinstance(token_ids, (list, np.ndarray)) else list(token_ids))

    def release(self, sequence: int, keep: bool = True) -> None:
        """Give back what a sequence holds; again is no error. In an open step it waits for the step's end.

        Args:
            sequence: Its id.
            keep: Leave what is computed matchable, the partly filled last block too.
        """
        self._core.release(sequence, keep)

    # --- steps ----------------------------------------------------------------------------------------------

    def begin_step(self, items: Sequence[tuple[int, int]], arrays: StepArrays, *, commit: bool = True) -> StepDecision:
        """Admit, match, allocate and fill `arrays`: all of it or nothing.

        Args:
            items: `(sequence, most tokens to compute)`, served in order; what finds no room in `max_step_tokens`
                or has nothing to compute drops out.
            arrays: Filled in place.
            commit: Make filled blocks matchable; equal prompts of one step are then computed once.

        Raises:
            OutOfBlocks: Blocks are missing; `.sequences` names what did not fit; nothing has changed.
        """
        number, sequences, total, samples, copies, admitted, sampled = self._core.begin_step(
            items if isinstance(items, list) else list(items), arrays.native, commit
        )
        return StepDecision(
            number,
            sequences,
            total,
            samples,
            tuple(BlockCopy(*c) for c in copies) if copies else (),
            tuple(Admission(*a) for a in admitted) if admitted else (),
            sampled,
        )

    def end_step(self, decision: StepDecision) -> None:
        """Its tokens are computed; its filled blocks are matchable. Steps end in the order they were begun."""
        self._core.end_step(decision.step)

    def abort_step(self, decision: StepDecision) -> None:
        """Leave every sequence as it was; a step begun after this one is cancelled with it."""
        self._core.abort_step(decision.step)

    def fits(self, items: Sequence[tuple[int, int]]) -> int:
        """Return how many leading items a step would take now; changes nothing."""
        return self._core.fits(list(items))

    # --- looking --------------------------------------------------------------------------------------------

    def tokens(self, sequence: int) -> list[int]:
        """Return its token ids; -1 for one not known yet."""
        tokens: list[int] = self._core.tokens(sequence).tolist()
        return tokens

    def num_tokens(self, sequence: int) -> int:
        """Return how many tokens it has, computed or not."""
        return self._core.sequence(sequence)["num_tokens"]

    def num_cached_tokens(self, sequence: int) -> int:
        """Return how many of its tokens were found in the tree at admission."""
        return self._core.sequence(sequence)["num_cached"]

    def num_computed_tokens(self, sequence: int) -> int:
        """Return how many of its tokens are held, cached ones included."""
        return self._core.sequence(sequence)["num_computed"]

    def table(self, sequence: int, group: int = 0) -> tuple[list[int], int]:
        """Return (block table, computed tokens) of a sequence; -1 = not held."""
        return self._core.block_table(sequence, group).tolist(), self.num_computed_tokens(sequence)

    def stats(self) -> Stats:
        """Return the counters and where the blocks are."""
        found = self._core.stats()
        groups = tuple(GroupStats(*row) for row in found.pop("groups"))
        return Stats(**found, groups=groups)

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            KVError: Naming what does not hold.
        """
        wrong = self._core.check()
        if wrong:
            raise KVError("the ledger is inconsistent: " + "; ".join(wrong))


def _group(group: GroupPlan) -> list[int]:
    life = group.lifetime
    reserved = max(group.num_blocks_reserved, group.num_blocks)
    if life is None:
        return [3, group.num_blocks, reserved, 1, 0, 0, 0]
    kind = 1 if life.window is not None else 2 if life.chunk is not None else 0
    tokens = group.tokens_per_block
    return [kind, group.num_blocks, reserved, tokens, life.window or 0, life.chunk or 0, life.sink_tokens]
