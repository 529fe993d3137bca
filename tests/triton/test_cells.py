"""The columns of Triton and FlashInfer in the support matrix: what is a yes there works, what is a no is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scene import KV, LATENT, WIDE_LATENT, Scene

from kvpool import support
from kvpool.backends import flashinfer
from kvpool.backends.base import Attention
from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.codecs import CODECS
from kvpool.errors import PlanError, UnsupportedError
from kvpool.kinds import FULL, IndexerKind, KVKind, Lifetime
from kvpool.layout import LAYOUTS

#: The interpreter computes with NumPy, which warns of products that get too large on the way.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REFERENCE = ReferenceBackend()
KINDS: dict[str, Any] = {
    "kv": KV,
    "kv of two sizes": KVKind(2, 64, 32),
    "kv of 112": KVKind(1, 112),
    "kv of 256": KVKind(1, 256),
    "latent": LATENT,
    "latent of two scales": WIDE_LATENT,
    "latent and rope apart": WIDE_LATENT,
    "index": (LATENT, IndexerKind(128)),
    "index of two scales": (LATENT, IndexerKind(256, 128)),
    "index of odd pieces": (LATENT, IndexerKind(96, 48)),
}
#: Among the quick tests is every second pair of kind and codec, in a layout by turns.
CELLS = [
    pytest.param(kind, codec, layout, marks=() if (i + j) % 2 and (i + j) // 2 % 2 == n else pytest.mark.long)
    for i, kind in enumerate(KINDS)
    for j, codec in enumerate(CODECS)
    for n, layout in enumerate(LAYOUTS)
]
LIFETIMES = (FULL, Lifetime(window=8), Lifetime(window=8, sink_tokens=2), Lifetime(chunk=8))


def scene_of(kind: str, codec: str, layout: str) -> Scene:
    stored: Any = codec
    if kind.startswith("index"):
        stored = {"latent": "fp8", "rope": "bf16", "index": codec}
    elif kind == "latent and rope apart":
        stored = {"latent": codec, "rope": "bf16" if codec != "bf16" else "fp16"}
    try:
        return Scene(KINDS[kind], stored, layout, rows=(1, 2), lengths=(5, 11))
    except PlanError as error:
        pytest.skip(str(error))


def run(scene: Scene) -> None:
    """Write, read, and attend or score on both backends, and compare."""
    backend = TritonBackend("cpu")
    backend.prepare(scene.pools, scene.step.buffers)
    backend.begin(scene.step)
    names = {name for pool in scene.pools.plan.groups[0].pools for name in pool.parts}
    rows = scene.step.total_tokens
    if "index" in names:
        (part,) = scene.filled("index")
        q, weights = scene.normal(rows, 4, part.vector.dim), scene.normal(rows, 4)
        got, want = (torch.zeros((rows, 6), dtype=torch.int64) for _ in range(2))
        REFERENCE.score(q, weights, part, scene.step, FULL, want)
        backend.score(q, weights, part, scene.step, FULL, got)
        assert torch.equal(got.sort().values, want.sort().values)  # equal scores may stand in any order
    elif "k" in names:
        k, v = scene.filled("k", "v")
        attend(scene, backend, (k,), v, v.vector.dim)
    else:
        parts = scene.filled(*sorted(names & {"latent", "rope"}))
        attend(scene, backend, parts, parts[0], KINDS_RANK[parts[0].vector.dim])


KINDS_RANK = {64: 48, 288: 256, 256: 256}


def attend(scene: Scene, backend: TritonBackend, k: tuple[Any, ...], v: Any, v_dim: int) -> None:
    rows, dim = scene.step.total_tokens, sum(part.vector.dim for part in k)
    q, asked = scene.normal(rows, 4, dim), Attention(dim**-0.5)
    got, want = (torch.empty(rows, 4, v_dim) for _ in range(2))
    REFERENCE.attend(q, k, v, v_dim, scene.step, asked, want, None)
    backend.attend(q, k, v, v_dim, scene.step, asked, got, None)
    assert (got - want).abs().max() <= 2e-6 * want.abs().max()
    for part in dict.fromkeys((*k, v)):
        x = scene.normal(rows, part.num_heads, part.vector.dim)
        backend.write((part,), (x,), scene.step)
        slots = scene.step.groups[part.group].slots
        a, b = torch.empty_like(x), torch.empty_like(x)
        backend.read(part, slots, a)
        REFERENCE.read(part, slots, b)
        assert torch.equal(a, b)


@pytest.mark.parametrize(("kind", "codec", "layout"), CELLS)
def test_a_cell_of_triton_says_what_its_kernels_do(kind: str, codec: str, layout: str) -> None:
    scene = scene_of(kind, codec, layout)
    reason = support.refusal("triton", scene.pools.plan)
    if reason:
        with pytest.raises(UnsupportedError):
            run(scene)
    else:
        run(scene)


@pytest.mark.parametrize("codec", [name for name in CODECS if not name.startswith("index")])
@pytest.mark.parametrize("kind", [name for name in KINDS if not name.startswith("index")])
def test_a_cell_of_flashinfer_says_what_its_adapter_takes(kind: str, codec: str) -> None:
    scene = scene_of(kind, codec, "HND")
    for lifetime in LIFETIMES:
        check_flashinfer(scene, lifetime)


def check_flashinfer(scene: Scene, lifetime: Lifetime) -> None:
    scene = Scene(scene.kind, scene.codec, lifetime=lifetime, rows=(1, 2), lengths=(5, 11), poisoned=False)
    names = {name for pool in scene.pools.plan.groups[0].pools for name in pool.parts}
    parts = scene.parts(*(("k", "v") if "k" in names else sorted(names)))
    reason = support.refusal("flashinfer", scene.pools.plan)
    k, v = ((parts[0],), parts[1]) if "k" in names else (parts, parts[0])
    refused = flashinfer.refusal(k, v, Attention(1.0, lifetime))
    if not refused and "k" in names:
        try:
            flashinfer.paged_cache(k[0], v)
        except UnsupportedError as error:
            refused = str(error)
    assert bool(refused) == bool(reason), f"{lifetime.name}: {refused!r} and {reason!r}"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"softcap": 5.0}, "windows, softcaps and sinks over latents"),
        ({"sinks": torch.zeros(4)}, "windows, softcaps and sinks over latents"),
        ({"indices": torch.zeros((3, 4), dtype=torch.int64)}, "sparse slots"),
        ({"tree": torch.zeros((3, 1), dtype=torch.int64)}, "tree masks"),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_flashinfer_leaves_out_nothing_a_call_over_latents_asks(asked: dict[str, Any], reason: str) -> None:
    (latent,) = scene_of("latent", "bf16", "HND").parts("latent")
    assert flashinfer.refusal((latent,), latent, Attention(1.0, **asked)) == reason
