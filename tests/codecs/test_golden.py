"""The bytes of a small pool, codec by layout, read through raw pointers: a format on disk or wire cannot drift."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_cases import CASES, GOLDEN, NUM_BLOCKS, SLOTS, Case, constants, golden_bytes, parts, tensors

from kvpool.backends.reference import ReferenceBackend
from kvpool.codecs import CODECS
from kvpool.pools import Pools


def ids(case: Case) -> str:
    return case.name


def written_pools(case: Case) -> Pools:
    """Pools of the case, cleared and written by the reference backend."""
    plan = case.plan()
    pools = Pools(plan)
    for block in range(NUM_BLOCKS):
        for piece in pools.slabs[0].block_bytes(block):
            piece.zero_()
    backend = ReferenceBackend()
    step: Any = SimpleNamespace(groups=(SimpleNamespace(slots=torch.tensor(SLOTS)),))
    for layer, name in parts(plan):
        part = pools.part(layer, name)
        given = constants(case, layer, name, part.codec.name, part.num_heads, part.vector.dim)
        if "smoothing" in given:
            given["smoothing"] = torch.from_numpy(given["smoothing"])  # type: ignore[arg-type]
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


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_pool_holds_the_kept_bytes_at_its_address(case: Case) -> None:
    pools = written_pools(case)
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
