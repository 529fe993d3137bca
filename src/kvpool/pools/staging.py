"""Small arrays that the host fills and the device reads: one pinned buffer, one device buffer, one copy.

The device's addresses never change, so that a captured graph reads whatever the last copy brought. Several stagings may
share the device buffer of one; their pinned buffers rotate, and one is filled again only after its copy has been made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

#: Arrays start at multiples of this in the buffer.
ALIGNMENT = 128


class Staging:
    """Arrays of a host and tensors of a device with equal contents after `upload`.

    Args:
        arrays: Host arrays, contiguous; read at every upload.
        device: Device of the tensors.
        share: A staging of arrays of the same shapes, whose tensors are to be these ones' as well.
    """

    @torch.inference_mode(False)  # a forward that makes one is in that mode, and the steps that fill it again are not
    def __init__(self, arrays: Sequence[npt.NDArray[np.generic]], device: str, share: Staging | None = None) -> None:
        self._arrays = tuple(arrays)
        offsets, size = [], 0
        for array in self._arrays:
            offsets.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        cuda = torch.device(device).type == "cuda"
        self._pinned = torch.zeros(max(size, 1), dtype=torch.uint8, pin_memory=cuda)
        self._bytes: torch.Tensor = (
            torch.zeros(max(size, 1), dtype=torch.uint8, device=device) if share is None else share._bytes
        )
        if self._bytes.numel() != self._pinned.numel():
            raise ValueError(f"cannot share {self._bytes.numel()} bytes with arrays of {size}")
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        host = self._pinned.numpy()
        self._slots = [
            host[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            for offset, array in zip(offsets, self._arrays, strict=True)
        ]
        self.tensors = tuple(
            self._bytes[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for offset, array in zip(offsets, self._arrays, strict=True)
        )

    def upload(self, lengths: Sequence[int] | None = None) -> None:
        """Copy the arrays to the device, in stream order.

        Args:
            lengths: Rows of each array that matter; the rest of the tensors keeps what it has or gets old contents.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last copy from this buffer was made
        for slot, array, rows in zip(self._slots, self._arrays, lengths or [len(a) for a in self._arrays], strict=True):
            slot[:rows] = array[:rows]
        self._bytes.copy_(self._pinned, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
