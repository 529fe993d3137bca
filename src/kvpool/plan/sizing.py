"""How many blocks: what sequences need, how a budget is shared, what fits. Knows groups and numbers, no model.

All arithmetic is in exact integers (shares in fractions); nothing loops over blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from kvpool.errors import PlanError
from kvpool.plan.geometry import GroupPlan, align, ceil_div

#: Block ids are int32 in tables.
MAX_BLOCKS = 2**31 - 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Load:
    """What a cache is sized for.

    Attributes:
        typical_seq_len: Tokens of an ordinary sequence.
        max_sequences: Sequences of one step.
        max_step_tokens: Tokens of one step over all its sequences.
        num_draft: Speculated tokens a sequence in one step; each keeps a state of its own.
        checkpoint_interval: Tokens between two kept states.
    """

    typical_seq_len: int
    max_sequences: int
    max_step_tokens: int
    num_draft: int
    checkpoint_interval: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much fits, and the group that says so."""

    value: int
    limited_by: str


def largest(fits: Callable[[int], bool], high: int) -> int:
    """Return the largest n in [0, high] with `fits(n)`, for a predicate that is true up to some n and false above."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def blocks_within(group: GroupPlan, num_bytes: int, granule: int) -> int:
    """Return the most blocks whose granules take at most `num_bytes`."""
    return largest(
        lambda n: group.committed_bytes(n, granule) <= num_bytes, min(num_bytes // group.bytes_per_block, MAX_BLOCKS)
    )


# --- what sequences need ------------------------------------------------------------------------------------


def live_blocks(group: GroupPlan, lengths: Mapping[int, int], load: Load) -> int:
    """Return the blocks that sequences hold while they are decoded together.

    Args:
        group: The group.
        lengths: Number of sequences of each length in tokens.
        load: Its `max_sequences` bounds the sequences of an open step, which hold one state more, one for each
            speculated token besides.
    """
    count = sum(lengths.values())
    held = sum(n * group.blocks_for(tokens) for tokens, n in lengths.items())
    if group.is_state:
        held += min(count, load.max_sequences) * (1 + load.num_draft)
    return held


def planned_blocks(group: GroupPlan, lengths: Mapping[int, int], load: Load) -> int:
    """Return `live_blocks`, plus what a chunk of prefill has in flight and the checkpoints that reuse lives on."""
    held = live_blocks(group, lengths, load)
    if group.is_state:
        return held + sum(n * ceil_div(tokens, load.checkpoint_interval) for tokens, n in lengths.items())
    if group.lifetime is not None and (group.lifetime.window or group.lifetime.chunk):
        return held + min(
            ceil_div(load.max_step_tokens, group.tokens_per_block),
            ceil_div(max(lengths, default=0), group.tokens_per_block),
        )
    return held


def unit_length(groups: Sequence[GroupPlan], load: Load) -> int:
    """Return the typical length in whole blocks: the unit in which tokens are counted."""
    return align(load.typical_seq_len, max(g.tokens_per_block for g in groups))


def as_lengths(num_tokens: int, unit: int) -> dict[int, int]:
    """Cut `num_tokens` into sequences of `unit` tokens and one for the rest."""
    lengths = {unit: num_tokens // unit} if num_tokens >= unit else {}
    if num_tokens % unit:
        lengths[num_tokens % unit] = 1
    return lengths


# --- what fits ----------------------------------------------------------------------------------------------


def sequences_that_fit(groups: Sequence[GroupPlan], num_tokens: int, load: Load) -> Capacity:
    """Return how many sequences of `num_tokens` are decoded together."""
    return _least(
        groups, lambda g: largest(lambda n: live_blocks(g, {num_tokens: n}, load) <= g.num_blocks, g.num_blocks)
    )


def longest_sequence(groups: Sequence[GroupPlan], batch: int, limit: int, load: Load) -> Capacity:
    """Return the longest length, up to `limit`, of `batch` sequences decoded together."""
    return _least(groups, lambda g: largest(lambda t: live_blocks(g, {t: batch}, load) <= g.num_blocks, limit))


def tokens_that_fit(groups: Sequence[GroupPlan], load: Load) -> Capacity:
    """Return the tokens that fit in sequences of the typical length, the last one cut."""
    unit = unit_length(groups, load)

    def tokens(group: GroupPlan) -> int:
        high = unit * (group.num_blocks + 1)
        return largest(lambda t: live_blocks(group, as_lengths(t, unit), load) <= group.num_blocks, high)

    return _least(groups, tokens)


def _least(groups: Sequence[GroupPlan], measure: Callable[[GroupPlan], int]) -> Capacity:
    return min((Capacity(measure(g), g.name) for g in groups), key=lambda c: c.value)


# --- sharing a budget ---------------------------------------------------------------------------------------


def share_by_need(groups: Sequence[GroupPlan], budget: int, load: Load) -> list[int]:
    """Return blocks for as many typical sequences as the budget pays for, in proportion to what they need."""
    unit = unit_length(groups, load)

    def need(num_sequences: int) -> list[int]:
        return [planned_blocks(g, {unit: num_sequences}, load) for g in groups]

    def cost(blocks: Sequence[int]) -> int:
        return sum(n * g.bytes_per_block for n, g in zip(blocks, groups, strict=True))

    count = largest(lambda s: cost(need(s)) <= budget, budget // min(g.bytes_per_block for g in groups))
    low, high = (need(count) if count else [0] * len(groups)), need(count + 1)
    spare = Fraction(budget - cost(low), cost(high) - cost(low))
    return [a + int((b - a) * spare) for a, b in zip(low, high, strict=True)]


def share_by_fraction(groups: Sequence[GroupPlan], budget: int, shares: Mapping[str, float], granule: int) -> list[int]:
    """Return blocks for given parts of the budget.

    Raises:
        PlanError: A group has no share, a name is unknown, or the shares do not add up to 1.
    """
    named = expand_names(groups, shares, "shares")
    for name, share in named.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise PlanError(f"shares[{name!r}] must be a number in (0, 1], got {share!r}")
    if abs(sum(named.values()) - 1) > 1e-6:
        raise PlanError(f"shares must add up to 1, got {sum(named.values()):g}: {dict(shares)}")
    total = sum(Fraction(named[g.name]) for g in groups)
    return [blocks_within(g, int(budget * Fraction(named[g.name]) / total), granule) for g in groups]


def expand_names(groups: Sequence[GroupPlan], given: Mapping[str, _T], what: str) -> dict[str, _T]:
    """Return `given` by full group name; `window` stands for the only group whose name begins with `window-`."""
    out: dict[str, _T] = {}
    for name, value in given.items():
        matches = [g.name for g in groups if g.name == name] or [
            g.name for g in groups if g.name.startswith(f"{name}-")
        ]
        if len(matches) != 1:
            raise PlanError(f"{what} names {name!r}; the groups are {', '.join(g.name for g in groups)}")
        out[matches[0]] = value
    missing = [g.name for g in groups if g.name not in out]
    if missing:
        raise PlanError(f"{what} says nothing for {', '.join(missing)}; name every group")
    return out


def fit(groups: Sequence[GroupPlan], blocks: Sequence[int], budget: int, granule: int) -> list[GroupPlan]:
    """Set `num_blocks` so that whole granules stay within the budget and no group could have one more block."""
    out = [replace(g, num_blocks=min(max(n, 1), g.num_blocks_reserved)) for g, n in zip(groups, blocks, strict=True)]

    def others(i: int) -> int:
        return sum(g.committed_bytes(g.num_blocks, granule) for j, g in enumerate(out) if j != i)

    for i, group in enumerate(out):
        allowed = blocks_within(group, max(budget - others(i), 0), granule)
        if allowed < group.num_blocks:
            out[i] = replace(group, num_blocks=max(allowed, 1))
    for i, group in enumerate(out):
        allowed = min(blocks_within(group, max(budget - others(i), 0), granule), group.num_blocks_reserved)
        if allowed > group.num_blocks:
            out[i] = replace(group, num_blocks=allowed)
    return out
