"""The indexer picks the tokens the reference picks, and conversion stores what was read."""

from __future__ import annotations

import pytest
import torch
from scene import INDEXER, KV, WIDE_LATENT, Scene

from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.codecs import CODECS
from kvpool.kinds import FULL, IndexerKind, Lifetime

REFERENCE = ReferenceBackend()
pytestmark = pytest.mark.filterwarnings("ignore:.*in multiply:RuntimeWarning")


@pytest.mark.parametrize("lifetime", [FULL, Lifetime(window=20), Lifetime(chunk=16)], ids=lambda x: x.name)
@pytest.mark.parametrize("codec", ["index-fp8", "index-fp4", "bf16"])
def test_the_best_tokens_are_those_of_the_reference(codec: str, lifetime: Lifetime) -> None:
    heads, topk = 8, 12
    for kind in (INDEXER, IndexerKind(256, 128)):
        scene = Scene((WIDE_LATENT, kind), {"latent": "fp8", "index": codec}, lifetime=lifetime, rows=(1, 5, 1))
        (part,) = scene.filled("index")
        q = scene.normal(7, heads, kind.index_head_dim)
        weights = torch.randn(7, heads, generator=scene.random)
        want = torch.empty(7, topk, dtype=torch.int64)
        got = torch.zeros_like(want)
        backend = TritonBackend("cpu")
        backend.prepare(scene.pools, scene.step.buffers)
        backend.begin(scene.step)
        REFERENCE.score(q, weights, part, scene.step, lifetime, want)
        backend.score(q, weights, part, scene.step, lifetime, got)
        assert torch.equal(want, got)
        assert (want[6] == -1).sum() == topk - 1  # a sequence of one token


@pytest.mark.parametrize("codec", ["fp8", "nvfp4-token"])
def test_conversion_stores_in_one_format_what_another_holds(codec: str) -> None:
    source, target = Scene(KV, "bf16", "NHD"), Scene(KV, codec, "HND", seed=1)
    (a,), (b,) = source.filled("k"), target.parts("k")
    slots, others = source.all_slots(), target.all_slots()
    slots[4] = -1
    TritonBackend("cpu").convert(a, slots, b, others)
    n = b.tokens_per_block
    held = slots >= 0
    values = a.planes["data"].tensor[slots[held] // n, :, slots[held] % n]
    for name, want in get(codec).encode(values, b.vector).items():
        assert torch.equal(b.planes[name].tensor[others[held] // n, :, others[held] % n], want)
    assert (b.planes["data"].tensor[others[4] // n, :, others[4] % n] == 0xFF).all()


def get(codec: str):  # type: ignore[no-untyped-def]
    return CODECS[codec]
