"""The index tensors of a step as numpy arrays, allocated once from a plan. Knows no sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpool import _native

if TYPE_CHECKING:
    from kvpool.plan import GroupPlan, Plan

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """The tables of one group.

    Attributes:
        slots: `[T]` int64, where each token goes; -1 writes nothing. Empty for a state group.
        block_table: `[S, M]` int32, -1 where not held. Empty for a state group.
        seq_lens: `[S]` int32, tokens after the step; 0 for padding.
        read_slots: `[S]` int32, states read, -1 = start from nothing. Empty but for a state group.
        write_slots: `[S]` int32, states written. Empty but for a state group.
        draft_slots: `[S, K]` int32, states after each draft token. Empty but for a state group with drafts.
        tokens_per_block: Tokens of a block; 1 for a state group.
    """

    slots: Int64
    block_table: Int32
    seq_lens: Int32
    read_slots: Int32
    write_slots: Int32
    draft_slots: Int32
    tokens_per_block: int


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """Everything a forward pass indexes with; the ledger fills it in place.

    Attributes:
        token_ids: `[T]` int64; -1 for a token not known yet.
        positions: `[T]` int32.
        cu_seqlens: `[S + 1]` int32; beyond the step the total repeats.
        num_tokens: `[S]` int32, tokens of each sequence in this step.
        last_rows: `[S]` int32, rows whose token is the last of its sequence; `num_samples` of them.
        sample_seqs: `[S]` int32, the table row each of them belongs to.
        draft_parents: `[T]` int32: -1, or for a draft token the row it follows.
        groups: One entry a group of the plan.
        native: The same addresses, as the core takes them.
    """

    token_ids: Int64
    positions: Int32
    cu_seqlens: Int32
    num_tokens: Int32
    last_rows: Int32
    sample_seqs: Int32
    draft_parents: Int32
    groups: tuple[GroupArrays, ...]
    native: _native.StepArrays

    @classmethod
    def from_plan(cls, plan: Plan) -> StepArrays:
        """Allocate for the plan's capacities: `max_step_tokens` T, `max_sequences` S."""
        tokens, rows = plan.max_step_tokens, plan.max_sequences
        common = (
            np.zeros(tokens, np.int64),
            np.zeros(tokens, np.int32),
            np.zeros(rows + 1, np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
            np.full(tokens, -1, np.int32),
        )
        native = _native.StepArrays([a.ctypes.data for a in common], tokens, rows)
        groups = tuple(_group(native, group, tokens, rows, plan.max_seq_len, plan.num_draft) for group in plan.groups)
        return cls(*common, groups, native)


def _group(
    native: _native.StepArrays, plan: GroupPlan, tokens: int, rows: int, max_seq_len: int, num_draft: int
) -> GroupArrays:
    state = plan.is_state
    width = 0 if state else -(-(max_seq_len + num_draft) // plan.tokens_per_block)
    states = rows if state else 0
    arrays = GroupArrays(
        slots=np.full(0 if state else tokens, -1, np.int64),
        block_table=np.full((0 if state else rows, width), -1, np.int32),
        seq_lens=np.zeros(rows, np.int32),
        read_slots=np.full(states, -1, np.int32),
        write_slots=np.full(states, -1, np.int32),
        draft_slots=np.full((states, num_draft), -1, np.int32),
        tokens_per_block=plan.tokens_per_block,
    )
    if state:
        native.add_state_group(
            arrays.read_slots.ctypes.data,
            arrays.write_slots.ctypes.data,
            arrays.draft_slots.ctypes.data,
            num_draft,
            arrays.seq_lens.ctypes.data,
        )
    else:
        native.add_group(
            plan.tokens_per_block,
            arrays.slots.ctypes.data,
            arrays.block_table.ctypes.data,
            width,
            arrays.seq_lens.ctypes.data,
        )
    return arrays
