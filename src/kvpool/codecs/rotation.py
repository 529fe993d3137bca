"""Smoothing and rotation: the two linear maps that may stand before a codec. Knows no format and no plane.

Keys with a few channels far larger than the rest lose their small channels in a quantised format. Both answers
leave every dot product as it was:

- smoothing `m` (a positive number a channel): `k / m` is stored and `q * m` is asked (SmoothQuant, Xiao et al. 2022);
- rotation `R` (a normalised Hadamard matrix, symmetric and orthogonal): `R k` is stored and `R q` is asked (QuaRot,
  Ashkboos et al. 2024). For values, `R v` is stored and the output is rotated back, since `R (p . R v) = p . v`.

With both, the stored vector is `R (x / m)`. The order of operations below defines the bytes: the division first, then
the butterflies from stride 1 up, sums before differences, then one multiplication by `fl32(n^-1/2)`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvpool.codecs.base import Vector
from kvpool.errors import PlanError

if TYPE_CHECKING:
    import torch

#: Smaller blocks spread an outlier over too few channels to help.
SMALLEST_BLOCK = 32
#: Range of a smoothing constant.
SMALLEST_SMOOTHING, LARGEST_SMOOTHING = 2.0**-24, 2.0**24
#: Finite elements beyond this are cut to it before either map, so that neither can make an infinity of them.
LARGEST_ELEMENT = 2.0**90


def rotation_block(vector: Vector) -> int:
    """Return the size of the Hadamard blocks on the diagonal of the rotation of `vector`.

    It is the largest power of two that divides every segment, so that the parts of a latent do not mix and its first
    part can be rotated back alone.

    Raises:
        PlanError: That power is below 32.
    """
    common = math.gcd(*vector.segments)
    block = common & -common
    if block < SMALLEST_BLOCK:
        raise PlanError(
            f"rotation needs a power of two of at least {SMALLEST_BLOCK} that divides the vector; {vector.dim} elements"
            f" in segments of {sorted(set(vector.segments))} have {block}; use smoothing, or no rotation for this part"
        )
    return block


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply by the block-diagonal normalised Hadamard matrix; its own inverse.

    Args:
        x: fp32 `[..., D]`, D a multiple of `block`.
        block: Power of two.
    """
    import torch

    shape = x.shape
    stride = 1
    while stride < block:
        pairs = x.reshape(-1, 2, stride)
        a, b = pairs[:, 0], pairs[:, 1]
        x = torch.stack((a + b, a - b), 1)
        stride *= 2
    return x.reshape(shape) * torch.tensor(block**-0.5, dtype=torch.float32, device=x.device)


def transform(x: torch.Tensor, smoothing: torch.Tensor | None, block: int) -> torch.Tensor:
    """Return what is stored for `x`: `R (x / m)`.

    Args:
        x: `[..., H, D]`, any float dtype; taken as fp32.
        smoothing: fp32 `[H, D]`, or None.
        block: Size of the rotation's blocks; 0 for no rotation.
    """
    import torch

    x = x.float()
    if smoothing is None and not block:
        return x
    x = torch.where(x.isfinite(), x.clamp(-LARGEST_ELEMENT, LARGEST_ELEMENT), x)
    if smoothing is not None:
        x = x / smoothing
    return rotate(x, block) if block else x


def restore(x: torch.Tensor, smoothing: torch.Tensor | None, block: int) -> torch.Tensor:
    """Undo `transform` on decoded vectors or on an attention output: `m * (R x)`.

    Args:
        x: fp32 `[..., H, D]`.
        smoothing: fp32 `[H, D]`, or None.
        block: Size of the rotation's blocks; 0 for no rotation.
    """
    if block:
        x = rotate(x, block)
    return x if smoothing is None else x * smoothing


def transform_query(q: torch.Tensor, smoothing: torch.Tensor | None, block: int) -> torch.Tensor:
    """Return the query whose dot product with a stored key is the original one: `R (q * m)`.

    Args:
        q: `[..., Q, D]`, any float dtype; taken as fp32. Query head i reads KV head `i // (Q / H)`.
        smoothing: fp32 `[H, D]` of the keys, or None.
        block: Size of the rotation's blocks; 0 for no rotation.
    """
    q = q.float()
    if smoothing is not None:
        q = q * smoothing.repeat_interleave(q.shape[-2] // smoothing.shape[0], 0)
    return rotate(q, block) if block else q
