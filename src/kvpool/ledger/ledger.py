"""The ledger's face: sequences in, decisions out. The core is native; what is parsed or named is done here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool import _native
from kvpool.ledger.answers import Answers
from kvpool.ledger.arrays import StepArrays
from kvpool.ledger.decisions import (
    Admission,
    BlockCopy,
    DraftRows,
    Evicted,
    Onboard,
    Pin,
    Resized,
    SlotMove,
    StepDecision,
)
from kvpool.ledger.extras import Extra, Media, encode
from kvpool.ledger.policies import Policy, Released, get_policy
from kvpool.ledger.retention import Retention, encode_ranges

if TYPE_CHECKING:
    from kvpool.plan import GroupPlan, Plan

#: No cap on a match.
UNLIMITED = 2**62
Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | Iterable[int]
#: Draft tokens of a sequence, and which earlier draft each follows (-1: the last known token; None: a chain).
Drafts = tuple[Sequence[int], Sequence[int] | None]


def _ids(tokens: Tokens) -> list[int] | tuple[int, ...] | NDArray[Any]:
    return tokens if isinstance(tokens, (list, tuple, np.ndarray)) else list(tokens)


class Ledger(Answers):
    """Which blocks belong to which sequence, which prefix is shared, and what is evicted.

    Works alone (a scheduler process without pools): it decides and returns decisions; who owns the memory carries
    them out. One thread opens steps; any thread may call anything else. Two steps may be open: what one frees may be
    given to the next, so steps must run in the order they were begun.

    Args:
        plan: Groups and limits.
        clock: Seconds, monotonic; durations of retention are measured with it.
        policy: Who goes first when there is no free block: a name of `policies.POLICIES`, or an object with
            `keys(released)`. `lru`, also called `priority+lru`: lowest priority first, within it the least recently
            released. The others order by their key alone, in groups of unlimited lifetime.
        events: How many events are kept until `events()` takes them; 0 for none.
        offer: Report what is evicted, for tiers below.
        lookup: Asked at admission with the keys of a prompt's whole blocks: how many leading ones can it have with what
            a tier fills? See `expect`.
        finder_bits: Bits of the private hash that are used; fewer make collisions, which cost time only.
        portable_sha: Do not use SHA instructions.

    Invariants: `used + cached + free == committed` for every group; `check()` verifies this and all others.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: str | Policy = "lru",
        events: int = 0,
        offer: bool = False,
        lookup: Callable[[Sequence[bytes]], int] | None = None,
        finder_bits: int = 64,
        portable_sha: bool = False,
    ) -> None:
        self.plan = plan
        self._clock = clock
        self._timed = False
        self._policy = get_policy(policy)
        self._lookup = lookup
        self._waiting: set[int] = set()
        limits = [
            plan.max_sequences,
            plan.max_step_tokens,
            plan.max_seq_len,
            plan.num_draft,
            plan.checkpoint_interval,
        ]
        mask = ((1 << finder_bits) - 1) << (64 - finder_bits)
        self._results = _native.Results(StepDecision, BlockCopy, Admission, DraftRows, Onboard, Evicted)
        self._core = _native.Ledger(
            [_group(g, plan) for g in plan.groups], limits, mask, portable_sha, self._policy is not None, offer, events
        )

    def _now(self) -> float:
        return self._clock() if self._timed else 0.0

    def _rekey(self) -> None:
        """Let the policy give keys to what was just released; until then a block's key is its time of release."""
        assert self._policy is not None
        for group, blocks, uses, index, priority, names, keys, now in self._core.unkeyed():
            plan = self.plan.groups[group]
            released = Released(
                group, blocks, uses, index, priority, names, keys, now, plan.num_blocks, plan.tokens_per_block
            )
            given = np.ascontiguousarray(self._policy.keys(released), np.float64)
            self._core.push_keys(group, blocks, given)

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
            ValueError: A token id is no id, or `max_cached_tokens` is negative.
        """
        if max_cached_tokens is not None and max_cached_tokens < 0:
            raise ValueError(f"max_cached_tokens must not be negative, got {max_cached_tokens}; None is no limit")
        if retention:
            self._timed = self._timed or any(r.duration is not None for r in retention)
        sequence = self._core.open(
            tokens if isinstance(tokens, (list, tuple, np.ndarray)) else list(tokens),
            b"" if salt is None else encode(salt),
            b"" if lora_id is None else encode(lora_id),
            [(m.start, m.start + m.num_tokens, encode(m.key)) for m in media] if media else [],
            encode_ranges(retention) if retention else [],
            UNLIMITED if max_cached_tokens is None else max_cached_tokens,
        )
        if self._lookup is not None:
            self._waiting.add(sequence)
        return sequence

    def extend(self, sequences: StepDecision | Sequence[int] | NDArray[np.int64], token_ids: Tokens | None) -> None:
        """Append one token to each of `sequences`; they are not computed yet.

        Args:
            sequences: Ids; or a decision, for the sequences it has samples for.
            token_ids: One id a sequence; None for tokens that are known later, see `resolve`.
        """
        ids = sequences.sampled if isinstance(sequences, StepDecision) else sequences
        self._core.extend(_ids(ids), None if token_ids is None else _ids(token_ids))

    def resolve(self, sequences: StepDecision | Sequence[int] | NDArray[np.int64], token_ids: Tokens) -> None:
        """Say what the oldest unknown token of each of `sequences` is; blocks that waited for it become matchable."""
        ids = sequences.sampled if isinstance(sequences, StepDecision) else sequences
        self._core.resolve(_ids(ids), _ids(token_ids))

    def append(self, sequence: int, token_ids: Tokens) -> None:
        """Append known tokens to one sequence; they are not computed yet."""
        self._core.append(sequence, _ids(token_ids))

    def rewind(self, sequence: int, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens; blocks no longer needed go first when room is made.

        Raises:
            UnsupportedError: A window or state needed there is gone; nothing has changed.
        """
        self._core.rewind(sequence, num_tokens, self._now())
        if self._policy is not None:
            self._rekey()

    def fork(self, sequence: int) -> int:
        """Return a new sequence with the same tokens that shares all blocks until one of them is written."""
        return self._core.fork(sequence)

    def pause(self, sequence: int) -> None:
        """Hold nothing until `resume`; what is computed stays matchable, the tokens stay known."""
        self._core.pause(sequence, self._now())
        if self._policy is not None:
            self._rekey()

    def resume(self, sequence: int) -> None:
        """Let the next step that names it admit it again; what is found then is no hit."""
        self._core.resume(sequence)

    def release(self, sequence: int, keep: bool = True) -> None:
        """Give back what a sequence holds; again is no error. In an open step it waits for the step's end.

        Args:
            sequence: Its id.
            keep: Leave what is computed matchable, the partly filled last block too.
        """
        self._core.release(sequence, keep, self._clock() if self._timed else 0.0)
        if self._policy is not None:
            self._rekey()

    # --- steps ----------------------------------------------------------------------------------------------

    def begin_step(
        self,
        items: Sequence[tuple[int, int]],
        arrays: StepArrays,
        *,
        drafts: Mapping[int, Drafts] | None = None,
        commit: bool = True,
    ) -> StepDecision:
        """Admit, match, allocate and fill `arrays`: all of it or nothing.

        Args:
            items: `(sequence, most tokens to compute)`, served in order; what finds no room in `max_step_tokens`
                or has nothing to compute drops out.
            arrays: Filled in place.
            drafts: Tokens to compute behind the last known one of a sequence; none is kept unless `accept` says so.
            commit: Make filled blocks matchable; equal prompts of one step are then computed once.

        Raises:
            OutOfBlocks: Blocks are missing; `.sequences` names what did not fit; nothing has changed.
        """
        if self._lookup is not None:
            self._ask_tiers(items)
        given = _given(drafts) if drafts else []
        return self._core.begin_step(
            items if type(items) is list else list(items),
            arrays.native,
            commit,
            given,
            self._clock() if self._timed else 0.0,
            self._results,
        )

    def decode_step(
        self,
        previous: StepDecision | None,
        sequences: NDArray[np.int64],
        token_ids: Tokens,
        arrays: StepArrays,
    ) -> StepDecision:
        """End the step before, append one token to each sequence, and begin the step that computes it, in one call.

        The same as `end_step`, `extend` and `begin_step`, for the loop that runs most.

        Args:
            previous: The step to end, or None.
            sequences: `[n]` ids.
            token_ids: `[n]`, one a sequence.
            arrays: Filled in place; not those of `previous` while it is still read.

        Raises:
            OutOfBlocks: Blocks are missing; the step before is ended and the tokens are appended: go on with
                `begin_step` once there is room.
        """
        ended = -1 if previous is None else previous.step
        decision = self._core.decode_step(
            ended, _ids(sequences), _ids(token_ids), arrays.native, self._now(), self._results
        )
        if self._policy is not None:
            self._rekey()
        return decision

    def _ask_tiers(self, items: Sequence[tuple[int, int]]) -> None:
        assert self._lookup is not None
        for sequence, _ in items:
            if sequence in self._waiting:
                self._waiting.discard(sequence)
                keys = self._core.keys(sequence)
                if keys:
                    self._core.expect(sequence, self._lookup(keys))

    def end_step(self, decision: StepDecision) -> None:
        """Its tokens are computed; its filled blocks are matchable. Steps end in the order they were begun."""
        self._core.end_step(decision.step, self._clock() if self._timed else 0.0)
        if self._policy is not None:
            self._rekey()

    def abort_step(self, decision: StepDecision) -> None:
        """Leave every sequence as it was; a step begun after this one is cancelled with it."""
        self._core.abort_step(decision.step, self._now())
        if self._policy is not None:
            self._rekey()

    def accept(self, sequence: int, indices: Sequence[int]) -> tuple[SlotMove, ...]:
        """Keep these drafts of the last step, in order; the rest is gone.

        Args:
            sequence: Its id.
            indices: Positions in the drafts given to `begin_step`; each one's parent is the one before it.

        Returns:
            Slots to move before the next step.
        """
        moves = self._core.accept(sequence, list(indices))
        if self._policy is not None:
            self._rekey()
        return tuple(SlotMove(*m) for m in moves)

    def fits(self, items: Sequence[tuple[int, int]]) -> int:
        """Return how many leading items a step would take now; changes nothing."""
        return self._core.fits(list(items))

    def missing(self, items: Sequence[tuple[int, int]]) -> list[int]:
        """Return what the first item that does not fit lacks: blocks by group, below 0 to spare; empty when all fit."""
        return self._core.missing(list(items))

    # --- the tree -------------------------------------------------------------------------------------------

    def peek(self, tokens: Tokens, *, salt: Extra = None, lora_id: Extra = None, media: Sequence[Media] = ()) -> int:
        """Return how many leading tokens of a prompt would be found now; nothing is held or touched."""
        found: int = self._core.peek(_ids(tokens), encode(salt), encode(lora_id), _media(media))[0]
        return found

    def pin(self, tokens: Tokens, *, salt: Extra = None, lora_id: Extra = None, media: Sequence[Media] = ()) -> Pin:
        """Keep the stored whole blocks of a prefix from being evicted or moved until `unpin`."""
        return Pin(*self._core.pin(_ids(tokens), encode(salt), encode(lora_id), _media(media)))

    def unpin(self, pin: Pin) -> None:
        """Let a pinned prefix go."""
        self._core.unpin(pin.id, self._now())
        if self._policy is not None:
            self._rekey()

    def clear(self, salt: Extra = None) -> None:
        """Forget what is stored under a salt, or everything; what is in use is dropped when it is released."""
        self._core.clear(None if salt is None else encode(salt))

    def reset(self) -> None:
        """Release every sequence and pin and forget everything stored: all blocks are free."""
        self._core.reset()

    def resize(self, group: int, num_blocks: int) -> Resized:
        """Change how many blocks of a group have memory, at its end; between steps.

        Growing gives ids at the end. Shrinking drops cached blocks by value, then moves blocks from the end into
        freed rows; it stops above a pinned block.
        """
        reached, moves, stopped_by, evicted = self._core.resize(group, num_blocks, self._results)
        return Resized(reached, tuple((m[1], m[2]) for m in moves), None if stopped_by < 0 else stopped_by, evicted)

    def expect(self, sequence: int, num_blocks: int) -> None:
        """Say how many leading blocks a waiting sequence can have with what tiers below fill.

        Its first step asks them for what the tree has not then; of a state group, for the state at the end.
        """
        self._core.expect(sequence, num_blocks)


def _given(drafts: Mapping[int, Drafts]) -> list[tuple[int, object, list[int]]]:
    return [(sequence, _ids(ids), list(parents or ())) for sequence, (ids, parents) in drafts.items()]


def _media(media: Sequence[Media]) -> list[tuple[int, int, bytes]]:
    return [(m.start, m.start + m.num_tokens, encode(m.key)) for m in media]


def _group(group: GroupPlan, plan: Plan) -> list[int]:
    life = group.lifetime
    reserved = max(group.num_blocks_reserved, group.num_blocks)
    if life is None:
        return [3, group.num_blocks, reserved, plan.tokens_per_block, 0, 0, 0]
    kind = 1 if life.window is not None else 2 if life.chunk is not None else 0
    tokens = group.tokens_per_block
    return [kind, group.num_blocks, reserved, tokens, life.window or 0, life.chunk or 0, life.sink_tokens]
