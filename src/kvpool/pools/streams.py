"""Copies beside a device's other work: on a stream of their own, between two events. Knows no block."""

from __future__ import annotations

from typing import Protocol

import torch


class SideStream(Protocol):
    """Copies that start after all the device was given before the first of them, and run beside what comes later."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying bytes; both stay the stream's until `wait`."""

    def wait(self) -> None:
        """Wait on the host until every copy started here is made."""


class CudaStream:
    """Copies of one batch on a CUDA stream.

    Args:
        stream: Where they run; shared by batches.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._started = False

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not self._started:
            self._started = True
            self._stream.wait_event(torch.cuda.current_stream(self._stream.device).record_event())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        if self._started:
            self._started = False
            self._stream.record_event().synchronize()
