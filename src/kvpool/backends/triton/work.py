"""The work items of a step on the device: made on first use, shared by all layers that ask alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvpool.backends.triton.schedule import Cut, WorkItems, make
from kvpool.pools.staging import Staging
from kvpool.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class DeviceItems:
    """Work items on the device.

    Attributes:
        items: `[I, 5]` int32.
        merges: `[M, 4]` int32.
        num_items: Items to launch; of a fixed schedule all it has room for.
        num_merges: Merges to launch.
        num_partials: Slots of partial results.
    """

    items: torch.Tensor
    merges: torch.Tensor
    num_items: int
    num_merges: int
    num_partials: int


class FixedItems:
    """Work items at addresses and with extents that do not change, for steps padded to one size."""

    def __init__(self, cut: Cut, num_sequences: int, num_tokens: int, device: str, share: FixedItems | None) -> None:
        most = cut.max_items(num_sequences, num_tokens)
        self._items = np.empty((most, 5), np.int32)
        self._merges = np.empty((cut.max_tiles(num_sequences, num_tokens), 4), np.int32)
        self._staging: Staging = Staging([self._items, self._merges], device, None if share is None else share._staging)
        items, merges = self._staging.tensors
        self.device_items = DeviceItems(items, merges, len(items), len(merges), most)

    def fill(self, work: WorkItems) -> None:
        """Take the items of another step; what is left over does nothing."""
        self._items.fill(-1)
        self._merges.fill(-1)
        self._items[: len(work.items)] = work.items
        self._merges[: len(work.merges)] = work.merges
        self._staging.upload()


Key = tuple[Cut, int, int, int]


class StepWork:
    """The schedules of one of the rotating step buffers.

    A padded step's items are fixed: they keep their addresses and extents from step to step, so that a captured graph
    can be replayed after `begin` has filled them anew.

    Args:
        buffers: The step buffers.
        root: The work of the buffers whose tensors these share; None for their own.

    Attributes:
        max_rows: Most rows of any sequence of the open step (a padded step: of its shape).
    """

    def __init__(self, buffers: StepBuffers, root: StepWork | None = None) -> None:
        self._buffers = buffers
        self._root = self if root is None else root
        self._step: Step | None = None
        self._made: dict[tuple[Cut, int], DeviceItems] = {}
        self._fixed: dict[Key, FixedItems] = {}
        self.max_rows = 0

    def begin(self, step: Step) -> None:
        """Forget the last step's items, and fill the fixed ones of this step's size."""
        self._step = step
        self._made.clear()
        rows = self._buffers.arrays.num_tokens[: step.num_sequences]
        self.max_rows = int(rows.max()) if len(rows) else 0
        if step.padded:
            self.max_rows = -(-step.total_tokens // max(step.num_sequences, 1))
            for key in self._root._fixed:
                if key[2:] == (step.num_sequences, step.total_tokens):
                    self.items(key[0], key[1])

    def items(self, cut: Cut, group: int) -> DeviceItems:
        """Return the items of the open step for one way to cut it."""
        found = self._made.get((cut, group))
        if found is None:
            assert self._step is not None
            found = self._fill(cut, group) if self._step.padded else self._upload(self.make(cut, group))
            self._made[cut, group] = found
        return found

    def make(self, cut: Cut, group: int) -> WorkItems:
        """Cut the open step."""
        assert self._step is not None
        count = self._step.num_sequences
        arrays = self._buffers.arrays
        return make(cut, arrays.num_tokens[:count], arrays.groups[group].seq_lens[:count])

    def _fill(self, cut: Cut, group: int) -> DeviceItems:
        assert self._step is not None
        key = (cut, group, self._step.num_sequences, self._step.total_tokens)
        for owner in (self._root, self):
            if key not in owner._fixed:
                share = None if owner is self._root else self._root._fixed[key]
                owner._fixed[key] = FixedItems(cut, *key[2:], str(self._buffers.token_ids.device), share)
        self._fixed[key].fill(self.make(cut, group))
        return self._fixed[key].device_items

    def _upload(self, work: WorkItems) -> DeviceItems:
        device = self._buffers.token_ids.device
        flat = torch.from_numpy(np.concatenate([work.items.ravel(), work.merges.ravel()]))
        if device.type == "cuda":
            flat = flat.pin_memory()
        flat = flat.to(device, non_blocking=True)
        size = work.items.size
        return DeviceItems(
            flat[:size].view(-1, 5), flat[size:].view(-1, 4), len(work.items), len(work.merges), work.num_partials
        )
