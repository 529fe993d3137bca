"""Vectors that kernels store and read back are those of the reference, to the bit, in every codec and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scene import INDEXER, KV, LATENT, WIDE_LATENT, Scene

from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.codecs import CODECS
from kvpool.layout import LAYOUTS

#: The interpreter computes with NumPy, which warns of what NaN and infinity do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REFERENCE = ReferenceBackend()
ROWS: Any = {"rows": (1, 17, 3), "lengths": (21, 40, 3)}
#: Codecs by kind; indexer keys are a kind of their own, whatever else the layer has.
STORED = [(c, kind) for c in CODECS for kind in ("kv", "latent", "wide") if kind == "kv" or not c.startswith("index")]
EXTREMES = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, -1e-40, 0.0, -0.0, 65504.0, 448.0, 464.0)


def triton_for(scene: Scene) -> TritonBackend:
    backend = TritonBackend("cpu")
    backend.prepare(scene.pools, scene.step.buffers)
    backend.begin(scene.step)
    return backend


def scene_of(codec: str, kind: str, layout: str, dtype: torch.dtype, seed: int = 0) -> tuple[Scene, Any]:
    """A cache and one of its parts: a key head, a latent of one or several segments, indexer keys."""
    if codec.startswith("index"):
        scene = Scene((KV, INDEXER), {"index": codec}, layout, dtype=dtype, seed=seed, **ROWS)
        return scene, scene.parts("index")[0]
    kinds = {"kv": KV, "latent": LATENT, "wide": WIDE_LATENT}
    scene = Scene(kinds[kind], codec, layout, dtype=dtype, seed=seed, **ROWS)
    return scene, scene.parts("k" if kind == "kv" else "latent")[0]


def vectors(scene: Scene, part: Any) -> torch.Tensor:
    """Ordinary rows, a row of zeros, tiny and huge rows, and rows with one extreme element each."""
    x = scene.normal(scene.step.total_tokens, part.num_heads, part.vector.dim).float()
    x[1] = 0
    x[2] *= 1e-30
    x[3] *= 1e30
    for i, value in enumerate(EXTREMES):
        x[4 + i, 0, 5] = value
    return x.to(scene.dtype)


def check(scene: Scene, part: Any) -> None:
    x = vectors(scene, part)
    slab = scene.pools.slabs[part.group]
    view = slab.bytes[: slab.group.bytes_per_block * 16]
    slots = scene.step.groups[part.group].slots
    slots[6] = -1
    before = view.clone()
    REFERENCE.write((part,), (x,), scene.step)
    want = view.clone()
    view.copy_(before)
    backend = triton_for(scene)
    backend.write((part,), (x,), scene.step)
    assert backend.counts(part) == part.constants.counts
    differ = (view != want).nonzero().flatten()
    # A NaN has many bit patterns in a plain format: equal values are equal bytes everywhere else.
    if part.codec.quantised:
        assert not len(differ), f"{len(differ)} bytes differ, first at {differ[:8].tolist()}"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.empty((len(slots), part.num_heads, part.vector.dim), dtype=dtype)
        b = torch.full_like(a, 7)
        REFERENCE.read(part, slots, a)
        backend.read(part, slots, b)
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_writes_and_reads_to_the_bit(codec: str) -> None:
    scene, part = scene_of(codec, "kv", "NHD", torch.float32, seed=1)
    check(scene, part)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("codec", "kind"), STORED)
def test_every_codec_kind_layout_and_source_type_writes_and_reads_to_the_bit(
    codec: str, kind: str, layout: str, dtype: torch.dtype
) -> None:
    check(*scene_of(codec, kind, layout, dtype))


@pytest.mark.parametrize("codec", ["fp8", "int8", "nvfp4-token"])
@pytest.mark.parametrize("rotation", [False, True])
def test_mixed_vectors_are_the_references_to_the_bit(codec: str, rotation: bool) -> None:
    scene, part = scene_of(codec, "kv", "HND", torch.bfloat16)
    heads, dim = part.num_heads, part.vector.dim
    generator = torch.Generator().manual_seed(1)
    matrix = torch.eye(dim) + 0.4 * torch.randn(heads, dim, dim, generator=generator) / dim**0.5
    part.constants.set(mixing=matrix, rotation=rotation)
    check(scene, part)
