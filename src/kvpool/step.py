"""The index tensors of one forward pass, at addresses that never change. Knows no pool and no kernel.

The ledger fills plain arrays; here they are wrapped as tensors once, or staged to a device. Two buffers rotate, so that
one step can be filled while the last is still read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool.errors import KVError
from kvpool.ledger import StepArrays, StepDecision
from kvpool.plan import Plan
from kvpool.pools.staging import Staging


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """The tables of one group for the sequences of a step (views cut to the step, fixed addresses).

    Attributes:
        slots: `[T]` int64, where each token goes; -1 writes nothing.
        block_table: `[S, M]` int32, -1 where not held.
        seq_lens: `[S]` int32, tokens of each sequence after the step.
        read_slots: State groups: `[S]` int32, the state each sequence starts from; -1 for none.
        write_slots: State groups: `[S]` int32, the state each sequence ends in, its drafts left out.
        draft_slots: State groups: `[S, K]` int32, the state after each of its drafts; -1 for none. K is the plan's.
    """

    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    draft_slots: torch.Tensor


class StepBuffers:
    """The arrays of one step at their full capacities, and the tensors kernels read.

    On the CPU the tensors are the arrays. On a device they are brought there by one copy a step, to addresses that all
    the buffers of a cache share: a captured graph reads whatever the last copy brought.

    Args:
        plan: Capacities.
        device: Where the tensors are.
        share: Buffers whose tensors are to be these ones' as well.
        staged: Whether tensors are copies; by default, where the device is not the CPU.

    Attributes:
        root: The buffers whose tensors these are.
        device: Where the tensors are.
    """

    def __init__(
        self, plan: Plan, device: str = "cpu", *, share: StepBuffers | None = None, staged: bool | None = None
    ) -> None:
        self.arrays = StepArrays.from_plan(plan)
        self.root = self
        a = self.arrays
        flat: list[NDArray[np.generic]] = [
            a.token_ids,
            a.positions,
            a.cu_seqlens,
            a.num_tokens,
            a.last_rows,
            a.sample_seqs,
        ]
        for g in a.groups:
            flat += [g.slots, g.block_table, g.seq_lens, g.read_slots, g.write_slots, g.draft_slots]
        self._staging: Staging | None = None
        tensors = tuple(torch.from_numpy(array) for array in flat)
        if staged or (staged is None and torch.device(device).type != "cpu"):
            self._staging = Staging(flat, device, None if share is None else share._staging)
            tensors = self._staging.tensors
            self.root = self if share is None else share.root
        self.token_ids, self.positions, self.cu_seqlens, self.num_tokens, self.last_rows, self.sample_seqs = tensors[:6]
        self.groups = tuple(GroupTensors(*tensors[i : i + 6]) for i in range(6, len(tensors), 6))
        self.device = self.token_ids.device

    def pad(self, num_sequences: int, num_tokens: int, num_samples: int, pad_to: tuple[int, int]) -> None:
        """Fill the rows behind a step with sequences of no token and tokens that are written nowhere.

        Raises:
            KVError: The step is larger than `pad_to`, or that is larger than the plan.
        """
        rows, tokens = pad_to
        a = self.arrays
        if not (num_sequences <= rows <= len(a.num_tokens) and num_tokens <= tokens <= len(a.token_ids)):
            raise KVError(
                f"pad_to={pad_to} must hold the step's {num_sequences} sequences and {num_tokens} tokens, and fit the"
                f" plan's {len(a.num_tokens)} and {len(a.token_ids)}"
            )
        a.token_ids[num_tokens:tokens] = 0
        a.positions[num_tokens:tokens] = 0
        a.cu_seqlens[num_sequences + 1 : rows + 1] = num_tokens
        a.num_tokens[num_sequences:rows] = 0
        a.last_rows[num_samples:rows] = 0
        a.sample_seqs[num_samples:rows] = 0
        for g in a.groups:
            g.slots[num_tokens:tokens] = -1
            g.seq_lens[num_sequences:rows] = 0
            for table in (g.block_table, g.read_slots, g.write_slots, g.draft_slots):
                table[num_sequences:rows] = -1

    def point_at_samples(self, decision: StepDecision, last: StepDecision) -> bool:
        """Write `-1 - i` for every unknown token that is sample `i` of the step before.

        Returns:
            Whether there are any.

        Raises:
            KVError: An unknown token is not one of its samples.
        """
        ids, starts = self.arrays.token_ids, self.arrays.cu_seqlens[: len(decision.sequences) + 1]
        rows = np.flatnonzero(ids[: decision.total_tokens] < 0)
        owners = np.searchsorted(starts, rows, side="right") - 1
        samples = {sequence: i for i, sequence in enumerate(last.sampled)}
        for row, owner in zip(rows.tolist(), owners.tolist(), strict=True):
            sequence = decision.sequences[owner]
            if sequence not in samples:
                raise KVError(f"sequence {sequence} has an unknown token of a step before the last; resolve it first")
            ids[row] = -1 - samples[sequence]
        return len(rows) > 0

    def upload(self) -> None:
        """Bring the arrays to the device."""
        if self._staging is not None:
            self._staging.upload()


class Step:
    """One forward pass: what to compute, where to write, what to read. A context manager.

    Leaving it makes its tokens computed; an exception inside leaves every sequence as it was, and cancels a step that
    was opened after this one.

    Args:
        buffers: Filled by the ledger.
        decision: What the ledger decided.
        close: Called once, with the step and whether it failed, as it ends.
        pad_to: (sequences, tokens) to give the tensors.
        carry_out: Does on the device what must be done before anything of the step runs.
        after: The step whose samples are unknown tokens of this one: token id `-1 - i` is its `next_ids[i]`.

    Attributes:
        device: Where its tensors are, and those of its calls must be.
        decision: What the ledger decided.
        num_sequences: S; of a padded step, what it is padded to.
        total_tokens: T; of a padded step, what it is padded to.
        padded: Its tensors have the extents asked for, whatever it computes.
        open: It has not ended yet, and was not cancelled.
        started: Its tensors are ready.
        next_ids: `[num_samples]` int64 on its device: what was sampled, for a next step that is opened before the ids
            are known; set by whoever samples.
        done: On CUDA, after its end: recorded behind its work, for other streams to wait for.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        decision: StepDecision,
        close: Callable[[Step, bool], None],
        pad_to: tuple[int, int] | None = None,
        carry_out: Callable[[Step], None] | None = None,
        after: Step | None = None,
    ) -> None:
        self.buffers = buffers
        self.device = buffers.device
        self.decision = decision
        self.num_sequences = len(decision.sequences)
        self.total_tokens = int(decision.total_tokens)
        self.num_samples = decision.num_samples
        self.padded = pad_to is not None
        self.next_ids: torch.Tensor | None = None
        self.done: torch.cuda.Event | None = None
        if pad_to is not None:
            buffers.pad(self.num_sequences, self.total_tokens, self.num_samples, pad_to)
            self.num_sequences, self.total_tokens = pad_to
        self.open, self.started = True, False
        self._close, self._carry_out, self._after = close, carry_out, after

    def start(self) -> Self:
        """Make everything ready on the device; called once, before anything else of the step runs.

        Steps start in the order they were opened: this one's copies and tensors may be what an older one still reads.

        Raises:
            KVError: It has tokens that the step before samples, and that one has no `next_ids` yet; or it was started.
        """
        if self.started:
            raise KVError("this step was started already; only one opened with start=False is started by its user")
        self.buffers.upload()
        if self._after is not None:
            if self._after.next_ids is None:
                raise KVError("a step computes what the one before it samples; set that one's next_ids first")
            ids = self.token_ids
            ids.copy_(torch.where(ids < 0, self._after.next_ids[(-1 - ids).clamp(min=0)], ids))
            self._after = None
        if self._carry_out is not None:
            self._carry_out(self)
        self.started = True
        return self

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
        """`[num_samples]` int32: rows whose token is the last known one of its sequence; padded, `[S]`."""
        return self.buffers.last_rows[: self.num_sequences if self.padded else self.num_samples]

    @cached_property
    def sample_seqs(self) -> torch.Tensor:
        """`[num_samples]` int32: table row of the sequence each of `last_rows` belongs to."""
        return self.buffers.sample_seqs[: self.num_samples]

    @cached_property
    def groups(self) -> tuple[GroupTensors, ...]:
        """The tables of every group, cut to this step."""
        t, s = self.total_tokens, self.num_sequences
        return tuple(
            GroupTensors(
                g.slots[:t], g.block_table[:s], g.seq_lens[:s], g.read_slots[:s], g.write_slots[:s], g.draft_slots[:s]
            )
            for g in self.buffers.groups
        )

    @cached_property
    def draft_rows(self) -> dict[int, slice]:
        """Rows that compute drafts, by sequence id; they follow the row of its last known token."""
        return {d.sequence: slice(d.first_row, d.first_row + d.num_rows) for d in self.decision.drafts}

    @cached_property
    def tree(self) -> torch.Tensor | None:
        """`[T, W]` int64 bit masks, or None without drafts: bit `i` says whether a row sees row `i` of its sequence.

        A draft sees the step's known tokens and the drafts it descends from, itself included.
        """
        if not self.decision.drafts:
            return None
        width = -(-int(self.buffers.arrays.num_tokens[: self.num_sequences].max()) // 64)
        seen = np.zeros((self.total_tokens, width * 64), np.bool_)
        starts = self.buffers.arrays.cu_seqlens
        parents = self.buffers.arrays.draft_parents
        for s in range(self.num_sequences):
            first = int(starts[s])
            for row in range(first, int(starts[s + 1])):
                if parents[row] < 0:
                    seen[row, : row - first + 1] = True
                else:
                    seen[row] = seen[parents[row]]
                    seen[row, row - first] = True
        packed = np.packbits(seen, axis=1, bitorder="little").view(np.int64)  # [T, W]
        return torch.from_numpy(packed).to(self.token_ids.device)

    def paged(self, group: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(kv_indptr [S+1], kv_indices, last_page_len [S])` int32, as FlashInfer takes them."""
        arrays = self.buffers.arrays.groups[group]
        lengths = arrays.seq_lens[: self.num_sequences].astype(np.int64)
        n = arrays.tokens_per_block
        pages = -(-lengths // n)
        indptr = np.zeros(self.num_sequences + 1, np.int32)
        np.cumsum(pages, out=indptr[1:])
        table = arrays.block_table[: self.num_sequences]
        indices = table[np.arange(table.shape[1]) < pages[:, None]]
        last = np.where(pages > 0, lengths - (pages - 1) * n, 0).astype(np.int32)
        device = self.buffers.token_ids.device
        first, ids, rest = (torch.from_numpy(a).to(device) for a in (indptr, indices, last))
        return first, ids, rest

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.open or kind is None:
            self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """End the step: commit what it computed, or undo it when it failed."""
        if not self.open:
            raise KVError("this step has ended already, or fell with the one before it; open one with cache.step(...)")
        if self.buffers.token_ids.is_cuda:
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record()
        self._close(self, failed)
        self.open = False
