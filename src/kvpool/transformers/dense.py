"""Between the dense batch of a forward and the packed rows of a step. Knows no model and no cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DenseMap:
    """Where the rows of a step stand in a dense batch `[B, n]`.

    Rows are aligned on the right: sequence `b` computes the last tokens of its row; what stands before them is padding,
    or was computed by an earlier step.

    Attributes:
        batch: B.
        columns: n.
        index: `[T]` int64, the place of every packed row in the flattened batch; None when it is every place in order.
    """

    batch: int
    columns: int
    index: torch.Tensor | None = None

    @classmethod
    def right_aligned(cls, counts: list[int]) -> DenseMap:
        """Map the last `counts[b]` columns of each row; 0 leaves a row out."""
        columns = max(counts)
        if min(counts) == columns:
            return cls(len(counts), columns)
        first = columns - torch.tensor(counts)
        return cls(len(counts), columns, (torch.arange(columns) >= first[:, None]).flatten().nonzero()[:, 0])

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of the step, `[B, H, n, D] -> [T, H, D]`; a view when nothing is ragged."""
        flat = x.transpose(1, 2).reshape(self.batch * self.columns, x.shape[1], x.shape[3])
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Put the rows of the step back, `[T, ...] -> [B, n, ...]`; zeros elsewhere."""
        if self.index is not None:
            flat = x.new_zeros((self.batch * self.columns, *x.shape[1:]))
            flat.index_copy_(0, self.index, x)
            x = flat
        return x.view(self.batch, self.columns, *x.shape[1:])
