"""The same cache twice, on the CPU and on a device with the same bytes, and attention in both held against each other.

What is expected is computed on the CPU by the reference backend.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "triton")]

from scene import Scene  # noqa: E402

from kvpool.backends.base import Attention  # noqa: E402
from kvpool.backends.reference import ReferenceBackend  # noqa: E402
from kvpool.backends.triton import TritonBackend  # noqa: E402

REFERENCE = ReferenceBackend()
#: Relative L2 error of outputs: bf16 operands give between 1e-3 and 1e-2.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 3e-3}
LARGE: Any = {"rows": (1, 1, 5, 130), "lengths": (1, 700, 2050, 300)}
SMALL: Any = {"rows": (1, 3), "lengths": (9, 20)}


def scenes(kind: Any, codec: Any, device: str, dtype: torch.dtype, **changes: Any) -> tuple[Scene, Scene]:
    """The same cache twice: on the CPU, and on the device with the same bytes."""
    shape = LARGE if device != "cpu" else SMALL
    given = {"tokens_per_block": 16, "dtype": dtype, **shape, **changes}
    here, there = Scene(kind, codec, **given), Scene(kind, codec, device=device, **given)
    return here, there


def mirror(here: Scene, there: Scene) -> None:
    for a, b in zip(here.pools.slabs, there.pools.slabs, strict=True):
        size = min(a.committed_bytes, b.committed_bytes)
        b.bytes[:size].copy_(a.bytes[:size])


def opened(scene: Scene) -> TritonBackend:
    backend = TritonBackend(scene.device)
    backend.prepare(scene.pools, scene.step.buffers)
    backend.begin(scene.step)
    return backend


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    got, want = got.cpu().double(), want.double()
    assert got.isfinite().all(), f"{what}: not finite"
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def attend(here: Scene, there: Scene, names: tuple[str, ...], v_dim: int, heads: int, what: str, **asked: Any) -> None:
    """Fill one scene, mirror it, attend in both."""
    parts = here.filled(*names)
    others = there.parts(*names)
    mirror(here, there)
    k, v = ((parts[0],), parts[1]) if names == ("k", "v") else (parts, parts[0])
    other_k, other_v = ((others[0],), others[1]) if names == ("k", "v") else (others, others[0])
    dim = sum(part.vector.dim for part in k)
    q = here.normal(here.step.total_tokens, heads, dim)
    want = torch.empty(*q.shape[:2], v_dim)
    got = torch.full(want.shape, float("nan"), dtype=here.dtype, device=there.device)
    want_lse = torch.empty(want.shape[:2])
    got_lse = torch.empty(want.shape[:2], device=there.device)
    on_device = {k: x.to(there.device) if isinstance(x, torch.Tensor) else x for k, x in asked.items()}
    REFERENCE.attend(q, k, v, v_dim, here.step, Attention(dim**-0.5, here.lifetime, **asked), want, want_lse)
    backend = opened(there)
    options = Attention(dim**-0.5, here.lifetime, **on_device)
    backend.attend(q.to(there.device), other_k, other_v, v_dim, there.step, options, got, got_lse)
    close(got, want, here.dtype, what)
    assert (got_lse.cpu() - want_lse).abs().max() < 2e-2, f"{what}: log-sum-exp"
