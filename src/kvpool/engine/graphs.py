"""Forward passes recorded once and replayed: CUDA graphs of decode steps, one a padded size.

A recorded pass reads addresses that never change (the step's tensors, the pools, the work items), so it serves any
step padded to its size. What records is a protocol: on a GPU it is CUDA's stream capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvpool.step import Step

Forward = Callable[[Step], torch.Tensor]


class Recording(Protocol):
    """A recorded pass."""

    def replay(self) -> torch.Tensor:
        """Run it again on what its addresses hold now; the result is at the same place every time."""


class Recorder(Protocol):
    """Records passes on one device."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Run a pass, which was run before, and keep what it does to the device."""


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """A captured graph and its output."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


class CudaRecorder:
    """Captures CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # Of this thread's calls only: those that move blocks to tiers meanwhile would end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return CudaRecording(graph, output)


class DecodeGraphs:
    """Runs decode steps from recordings.

    Args:
        forward: The pass: an open step to logits `[num_samples, ...]`.
        max_sequences: Sequences of the largest step.
        recorder: What records; CUDA's capture by default.

    Invariants: one recording a size; every step it is replayed for was padded to that size.
    """

    def __init__(self, forward: Forward, max_sequences: int, recorder: Recorder | None = None) -> None:
        self._forward = forward
        self._recorder = CudaRecorder() if recorder is None else recorder
        self._recordings: dict[int, Recording] = {}
        self.sizes = sizes_up_to(max_sequences)

    def pad_to(self, num_tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the size to pad a step to, or None for one that is no decode step.

        Args:
            num_tokens: Tokens each sequence of the step is to compute.
        """
        if not num_tokens or max(num_tokens) > 1 or len(num_tokens) > self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= len(num_tokens))
        return size, size

    def forward(self, step: Step) -> torch.Tensor:
        """Run an open step: replayed when it was padded by `pad_to`, as it is otherwise.

        Returns:
            Logits of the samples; overwritten by the next step of this size.
        """
        if not step.padded:
            return self._forward(step)
        size = step.num_sequences
        if size not in self._recordings:
            # The first pass compiles kernels and makes the work items; writing the same vectors again changes nothing.
            logits = self._forward(step).clone()
            self._recordings[size] = self._recorder.record(lambda: self._forward(step))
            return logits[: step.num_samples]
        return self._recordings[size].replay()[: step.num_samples]


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Return the sizes steps are padded to: powers of two, from 8 on also one between two of them."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        if size >= 8 and size + size // 2 < most:
            sizes.append(size + size // 2)
        size *= 2
    return (*sizes, most)
