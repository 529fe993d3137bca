"""One slab a group: its address range, how much of it has memory, and its planes as strided tensors."""

from __future__ import annotations

import torch

from kvpool.dtypes import dtype
from kvpool.plan import GroupPlan, PlanePlan, align
from kvpool.pools.memory import reserve


class Slab:
    """The memory of one group.

    Invariants: blocks `[0, num_blocks)` have memory behind every layer; `address` and all strides never change.
    """

    def __init__(self, group: GroupPlan, device: str, *, touch: bool = False) -> None:
        self.group = group
        self.memory = reserve(device, group.slab_bytes)
        self.bytes = self.memory.tensor()
        self.num_blocks = 0
        self.resize(group.num_blocks)
        if touch:
            for start, stop in self._ranges(0, group.num_blocks):
                self.bytes[start:stop].zero_()

    @property
    def address(self) -> int:
        """Address of byte zero."""
        return self.memory.address

    @property
    def committed_bytes(self) -> int:
        """Bytes with memory behind them."""
        return sum(stop - start for start, stop in self._ranges(0, self.num_blocks))

    def _ranges(self, old: int, new: int) -> list[tuple[int, int]]:
        """Byte ranges that blocks `[old, new)` add to those of `[0, old)`, in whole granules."""
        granule = self.memory.granule_bytes
        return [
            (start + align(row * old, granule), start + align(row * new, granule))
            for start, row in self.group.pieces(0)
        ]

    def resize(self, num_blocks: int) -> None:
        """Commit or give back memory at the end, so that blocks `[0, num_blocks)` can be used.

        Raises:
            KVError: No addresses were reserved for so many, or no memory is left.
        """
        if not 0 <= num_blocks <= self.group.num_blocks_reserved:
            raise ValueError(f"{num_blocks} blocks asked; {self.group.num_blocks_reserved} have addresses")
        if num_blocks >= self.num_blocks:
            for start, stop in self._ranges(self.num_blocks, num_blocks):
                self.memory.commit(start, stop)
        else:
            for start, stop in self._ranges(num_blocks, self.num_blocks):
                self.memory.decommit(start, stop)
        self.num_blocks = num_blocks

    def plane(self, plane: PlanePlan) -> torch.Tensor:
        """Return a plane as a strided view `[B, L, F, H, N, C]` (`C` missing for one value a vector)."""
        element = dtype(plane.dtype)
        typed = self.bytes.view(getattr(torch, element.torch_name))
        strides = tuple(s // element.itemsize for s in plane.strides)
        return typed.as_strided(plane.shape, strides, plane.offset // element.itemsize)

    def block_bytes(self, block: int) -> list[torch.Tensor]:
        """Return the pieces of one block as uint8 views: one, or one a layer when layer-first."""
        return [self.bytes[start : start + size] for start, size in self.group.pieces(block)]
