"""Random operations on a whole cache; every vector read is verified. One seed decides all, and is printed."""

from __future__ import annotations

import inspect
import zlib

import pytest

import kvpool as kv
from kvpool.kinds import KVKind, LatentKind, LayerSpec
from kvpool.sequence import Sequence

from .operations import OPERATIONS
from .world import Case, Storm

GQA = (LayerSpec((KVKind(3, 32),)),) * 2  # H, N and D differ in every case
MLA = (LayerSpec((LatentKind(64, 32),)),) * 2

CASES = [
    Case("gqa-bf16-reference", GQA),
    Case("gqa-fp32-nhd-reference", GQA, codec="fp32", layout="NHD", tokens_per_block=2, num_blocks=50),
    Case("gqa-fp16-block-16-reference", GQA, codec="fp16", tokens_per_block=16, num_blocks=12),
    Case("mla-bf16-reference", MLA),
]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int | None:
    given: int | None = request.config.getoption("--storm-seed")
    return given


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_read_in_a_storm_is_what_was_written(case: Case, seed: int | None) -> None:
    storm = Storm(case, zlib.crc32(case.name.encode()) if seed is None else seed)
    storm.run(150, OPERATIONS)
    assert storm.counts["serve"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_long_storm_of_a_fresh_seed_reads_what_was_written(case: Case, seed: int | None) -> None:
    chosen = int.from_bytes(__import__("os").urandom(4), "little") if seed is None else seed
    print(f"seed {chosen}")
    Storm(case, chosen).run(5000, OPERATIONS)


def test_every_public_method_of_the_cache_is_in_the_storm() -> None:
    covered = {name for operation in OPERATIONS.values() for name in operation.covers} | ALWAYS
    public = {
        f"{kind.__name__}.{name}"
        for kind in (kv.KVCache, Sequence)
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert public - covered == set(), "write an operation for these in tests/storm/operations.py"
    assert covered - public == set(), "these are no public methods any more"


#: What the storm does after every operation.
ALWAYS = {"KVCache.check", "KVCache.stats", "KVCache.read"}
