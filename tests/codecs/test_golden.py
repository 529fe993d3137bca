"""The bytes of a small pool, codec by layout, read through raw pointers: a format on disk or wire cannot drift."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_cases import CASES, GOLDEN, NUM_BLOCKS, SLOTS, Case, constants, golden_bytes, parts, tensors

from kvpool.backends import get_backend
from kvpool.codecs import CODECS
from kvpool.pools import Pools
from kvpool.step import StepBuffers


def ids(case: Case) -> str:
    return case.name


def written_pools(case: Case, backend_name: str) -> Pools:
    """Pools of the case, cleared and written by a backend."""
    plan = case.plan()
    pools = Pools(plan)
    for block in range(NUM_BLOCKS):
        for piece in pools.slabs[0].block_bytes(block):
            piece.zero_()
    backend = get_backend(backend_name, "cpu")
    buffers = StepBuffers(plan)
    buffers.groups[0].slots[: len(SLOTS)] = torch.tensor(SLOTS)
    buffers.cu_seqlens[1] = len(SLOTS)
    buffers.groups[0].seq_lens[0] = len(SLOTS)
    groups = (SimpleNamespace(slots=buffers.groups[0].slots[: len(SLOTS)]),)
    step: Any = SimpleNamespace(buffers=buffers, groups=groups, num_sequences=1, total_tokens=len(SLOTS))
    backend.prepare(pools, buffers)
    backend.begin(step)
    for layer, name in parts(plan):
        part = pools.part(layer, name)
        given = constants(case, layer, name, part.codec.name, part.num_heads, part.vector.dim)
        for option in given.keys() & {"smoothing", "mixing"}:
            given[option] = torch.from_numpy(given[option])  # type: ignore[arg-type]
        part.constants.set(**given)  # type: ignore[arg-type]
        x = torch.from_numpy(tensors(layer, name, part.num_heads, part.vector.dim)).bfloat16()
        backend.write((part,), (x,), step)
    return pools


def test_every_codec_has_golden_bytes() -> None:
    stored = {pool.codec for case in CASES for group in case.plan().groups for pool in group.pools}
    assert stored == set(CODECS)
    assert {p.stem for p in GOLDEN.glob("*.bin")} == {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_definitions_still_give_the_kept_bytes(case: Case) -> None:
    assert golden_bytes(case) == (GOLDEN / f"{case.name}.bin").read_bytes()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_pool_holds_the_kept_bytes_at_its_address(case: Case, backend: str) -> None:
    pools = written_pools(case, backend)
    kept = (GOLDEN / f"{case.name}.bin").read_bytes()
    assert ctypes.string_at(pools.slabs[0].address, len(kept)) == kept


def test_an_indexer_block_is_the_record_deepgemm_reads() -> None:
    # Per block and layer: 128 bytes of codes a token, then one fp32 scale a token, nothing between.
    case = next(c for c in CASES if c.name == "index-fp8-HND")
    plan = case.plan()
    _, pool, _, _ = plan.find(0, "index")
    data, scale = pool.plane("data"), pool.plane("scale")
    n = case.tokens_per_block
    assert scale.offset - data.offset == 128 * n
    assert (data.strides[4], scale.strides[4]) == (128, 4)
