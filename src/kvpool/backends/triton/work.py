"""The work items of a step on the device: made on first use, shared by all layers that ask alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvpool.backends.triton.schedule import Cut, WorkItems, make
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


class StepWork:
    """The schedules of one of the rotating step buffers.

    Attributes:
        max_rows: Most rows of any sequence of the open step.
    """

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._step: Step | None = None
        self._made: dict[tuple[Cut, int], DeviceItems] = {}
        self.max_rows = 0

    def begin(self, step: Step) -> None:
        """Forget the last step's items."""
        self._step = step
        self._made.clear()
        rows = self._buffers.arrays.num_tokens[: step.num_sequences]
        self.max_rows = int(rows.max()) if len(rows) else 0

    def items(self, cut: Cut, group: int) -> DeviceItems:
        """Return the items of the open step for one way to cut it."""
        found = self._made.get((cut, group))
        if found is None:
            found = self._made[cut, group] = self._upload(self.make(cut, group))
        return found

    def make(self, cut: Cut, group: int) -> WorkItems:
        """Cut the open step."""
        assert self._step is not None
        count = self._step.num_sequences
        arrays = self._buffers.arrays
        return make(cut, arrays.num_tokens[:count], arrays.groups[group].seq_lens[:count])

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
