"""Steps in flight: forward and sampling run in order, on a thread or on a GPU, while the next step is planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kvpool.engine.request import Request
from kvpool.errors import KVError
from kvpool.step import Step


@dataclass(frozen=True, slots=True)
class Landed:
    """What a pass gave.

    Attributes:
        ids: `[num_samples]` int64 on the host; on CUDA there once `arrived` has passed.
        arrived: Recorded behind the copy of `ids`; None where they are there already.
        forward_s: CPU seconds of the forward.
        sampling_s: CPU seconds of choosing tokens.
    """

    ids: torch.Tensor
    arrived: torch.cuda.Event | None
    forward_s: float
    sampling_s: float


@dataclass(frozen=True, slots=True)
class Flight:
    """An open step whose pass was handed to a lane.

    Attributes:
        requests: With their rows, in the order of the step's table rows.
        sampled: Those a token is sampled for, in the order of its samples.
        landing: Its pass.
        opened_s: When it was opened, on the engine's clock.
    """

    step: Step
    requests: tuple[tuple[Request, int], ...]
    sampled: tuple[Request, ...]
    landing: Future[Landed]
    opened_s: float


class Lane:
    """Runs passes one after another, in the order they were given.

    Args:
        threaded: On a thread of its own: for a CPU, whose work is done when a call returns. Else at once, on the
            caller's: for a GPU, which is left behind, and where nothing is to overlap.

    Attributes:
        spent_s: CPU seconds of the caller's thread in passes, and in waiting for them.
    """

    def __init__(self, threaded: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "kvpool-forward") if threaded else None
        self.spent_s = 0.0

    def submit(self, work: Callable[[], Landed], before: Flight | None) -> Future[Landed]:
        """Run a pass behind the one before; where that failed, this one fails too, and is not run."""

        def run() -> Landed:
            if before is not None and before.landing.exception() is not None:
                raise KVError("cancelled: the step before failed")
            return work()

        if self._thread is not None:
            return self._thread.submit(run)
        started = time.thread_time()
        landing: Future[Landed] = Future()
        try:
            landing.set_result(run())
        except Exception as error:
            landing.set_exception(error)
        self.spent_s += time.thread_time() - started
        return landing

    def wait(self, landing: Future[Landed]) -> tuple[Landed, list[int]]:
        """Wait for a pass; return it and the tokens sampled. Raises what it raised."""
        started = time.thread_time()
        landed = landing.result()
        if landed.arrived is not None:
            landed.arrived.synchronize()
        ids: list[int] = landed.ids.tolist()
        self.spent_s += time.thread_time() - started
        return landed, ids


def fetch(ids: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Bring sampled tokens to the host without waiting for them."""
    if not ids.is_cuda:
        return ids, None
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived
