"""Whose threads do the work never changes an answer: the pool's own, or those of torch's OpenMP runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from paged import Batch, PlainStore, attend, workers

from kvpool import _native


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def scene() -> tuple[Batch, _native.Attention, torch.Tensor]:
    torch.manual_seed(3)
    batch = Batch([700, 30, 513], [1, 1, 2], 16, 90)
    store = PlainStore(90, 2, 16, 64, torch.bfloat16, "HND")
    store.tensor.normal_()
    scene.keep = store  # type: ignore[attr-defined]
    batch.plan(2, 2, split_tokens=128)
    return batch, _native.Attention([store.native], store.native, 64, 8), torch.randn(4, 8, 64).bfloat16()


def test_torchs_threads_and_our_own_give_the_same_answer() -> None:
    batch, attention, q = scene()
    pool, found = workers("generic", 2), []
    for number in (1, 2, 3, 2, 1):
        torch.set_num_threads(number)
        torch.randn(64, 64) @ torch.randn(64, 64)
        found.append(attend(pool, batch, attention, q, 64, scale=0.1)[0])
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("number", [1, 2])
def test_a_forked_child_starts_threads_of_its_own(number: int) -> None:
    batch, attention, q = scene()
    torch.set_num_threads(number)
    pool = workers("generic", 2)
    want, _ = attend(pool, batch, attention, q, 64, scale=0.1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in range(3):
                got, _ = attend(pool, batch, attention, q, 64, scale=0.1)
                status = 0 if torch.equal(got, want) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
