"""The index tensors of one forward pass, at addresses that never change. Knows no pool and no kernel.

The ledger fills plain arrays; here they are wrapped as tensors once. Two buffers rotate, so that one step can be
filled while the last is still read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch

from kvpool.errors import KVError
from kvpool.ledger import StepArrays, StepDecision
from kvpool.plan import Plan


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """The tables of one group for the sequences of a step (views cut to the step, fixed addresses).

    Attributes:
        slots: `[T]` int64, where each token goes; -1 writes nothing.
        block_table: `[S, M]` int32, -1 where not held.
        seq_lens: `[S]` int32, tokens of each sequence after the step.
        read_slots: State groups: `[S]` int32, the state each sequence starts from; -1 for none.
        write_slots: State groups: `[S]` int32, the state each sequence ends in.
    """

    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor


class StepBuffers:
    """The arrays of one step at their full capacities, as tensors on the same memory."""

    def __init__(self, plan: Plan) -> None:
        self.arrays = StepArrays.from_plan(plan)
        self.token_ids = torch.from_numpy(self.arrays.token_ids)
        self.positions = torch.from_numpy(self.arrays.positions)
        self.cu_seqlens = torch.from_numpy(self.arrays.cu_seqlens)
        self.num_tokens = torch.from_numpy(self.arrays.num_tokens)
        self.last_rows = torch.from_numpy(self.arrays.last_rows)
        self.sample_seqs = torch.from_numpy(self.arrays.sample_seqs)
        self.groups = tuple(
            GroupTensors(
                torch.from_numpy(g.slots),
                torch.from_numpy(g.block_table),
                torch.from_numpy(g.seq_lens),
                torch.from_numpy(g.read_slots),
                torch.from_numpy(g.write_slots),
            )
            for g in self.arrays.groups
        )


class Step:
    """One forward pass: what to compute, where to write, what to read. A context manager.

    Leaving it makes its tokens computed; an exception inside leaves every sequence as it was.

    Attributes:
        decision: What the ledger decided.
        num_sequences: S.
        total_tokens: T.
    """

    def __init__(self, buffers: StepBuffers, decision: StepDecision, close: Callable[[Step, bool], None]) -> None:
        self.buffers = buffers
        self.decision = decision
        self.num_sequences = len(decision.sequences)
        self.total_tokens = int(decision.total_tokens)
        self.num_samples = decision.num_samples
        self.open = True
        self._close = close

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the sequences, in the order of the table rows."""
        return self.decision.sequences

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """`[T]` int64: the tokens to compute, sequence after sequence."""
        return self.buffers.token_ids[: self.total_tokens]

    @cached_property
    def positions(self) -> torch.Tensor:
        """`[T]` int32: position of each token in its sequence."""
        return self.buffers.positions[: self.total_tokens]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """`[S+1]` int32: first row of each sequence."""
        return self.buffers.cu_seqlens[: self.num_sequences + 1]

    @cached_property
    def num_tokens(self) -> torch.Tensor:
        """`[S]` int32: rows of each sequence."""
        return self.buffers.num_tokens[: self.num_sequences]

    @cached_property
    def last_rows(self) -> torch.Tensor:
        """`[num_samples]` int32: rows whose token is the last known one of its sequence."""
        return self.buffers.last_rows[: self.num_samples]

    @cached_property
    def sample_seqs(self) -> torch.Tensor:
        """`[num_samples]` int32: table row of the sequence each of `last_rows` belongs to."""
        return self.buffers.sample_seqs[: self.num_samples]

    @cached_property
    def groups(self) -> tuple[GroupTensors, ...]:
        """The tables of every group, cut to this step."""
        t, s = self.total_tokens, self.num_sequences
        return tuple(
            GroupTensors(g.slots[:t], g.block_table[:s], g.seq_lens[:s], g.read_slots[:s], g.write_slots[:s])
            for g in self.buffers.groups
        )

    def paged(self, group: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(kv_indptr [S+1], kv_indices, last_page_len [S])` int32, as FlashInfer takes them."""
        tables = self.groups[group]
        lengths = tables.seq_lens.long()
        n = self.buffers.arrays.groups[group].tokens_per_block
        pages = (lengths + n - 1) // n
        indptr = torch.zeros(self.num_sequences + 1, dtype=torch.int32)
        indptr[1:] = pages.cumsum(0)
        indices = (
            torch.cat([tables.block_table[s, : int(p)] for s, p in enumerate(pages)]) if len(pages) else indptr[:0]
        )
        return indptr, indices, (lengths - (pages - 1) * n).int()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """End the step: commit what it computed, or undo it when it failed."""
        if not self.open:
            raise KVError("this step has ended already; open a new one with cache.step(...)")
        self.open = False
        self._close(self, failed)
