"""Smoothing, rotation and mixing: the linear maps that may stand before a codec. Knows no format and no plane.

Keys with a few channels far larger than the rest lose their small channels in a quantised format. All three answers
leave every dot product of a query and a key as it was:

- smoothing `m` (a positive number a channel): `k / m` is stored and `q * m` is asked (SmoothQuant, Xiao et al. 2022);
- rotation `R` (a normalised Hadamard matrix, symmetric and orthogonal): `R k` is stored and `R q` is asked (QuaRot,
  Ashkboos et al. 2024). For values, `R v` is stored and the output is rotated back, since `R (p . R v) = p . v`;
- mixing `M` (an invertible matrix of each head, of keys only): `k M^-1` is stored and `q M^T` is asked. It is smoothing
  for channels that vary together, and takes its place.

With smoothing and rotation the stored vector is `R (x / m)`. The order of operations below defines the bytes: the
division first, then the butterflies from stride 1 up, sums before differences, then one multiplication by
`fl32(n^-1/2)`. With mixing it is `x W`, where `W = M^-1 R` was rounded to fp32 once: products are rounded, then added
channel after channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


def multiply(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return `x M` of each head, summed channel after channel: the same bits on every machine.

    Args:
        x: fp32 `[..., Q, D]`; head i takes the matrix `i // (Q / H)`.
        matrix: fp32 `[H, D, D]`.
    """
    matrix = _for_heads(matrix, x.shape[-2])
    out = x[..., :1] * matrix[:, 0]
    for i in range(1, x.shape[-1]):
        out = out + x[..., i : i + 1] * matrix[:, i]
    return out


Multiply = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """A mixing matrix `M` of each head and the rotation `R` that follows it, made ready.

    Attributes:
        store: fp32 `[H, D, D]`: `x @ store` is stored; `M^-1 R`.
        restore: fp32 `[H, D, D]`, the inverse: `R M`.
        ask: fp32 `[H, D, D]`: `q @ ask` is asked; the transpose of `restore`.
    """

    store: torch.Tensor
    restore: torch.Tensor
    ask: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, block: int) -> Mixing:
        """Prepare `M [H, D, D]`, in double precision."""
        import torch

        m = matrix.double()
        turned = _rotation_matrix(m.shape[-1], block) if block else torch.eye(m.shape[-1], dtype=torch.float64)
        restore = (turned @ m).float()
        return cls((m.inverse() @ turned).float().contiguous(), restore, restore.mT.contiguous())


def _rotation_matrix(dim: int, block: int) -> torch.Tensor:
    import torch

    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.kron(torch.eye(dim // block, dtype=torch.float64), h * block**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class Maps:
    """The maps before one part's codec.

    Attributes:
        smoothing: fp32 `[H, D]`, or None.
        block: Size of the rotation's blocks; 0 without one, and where mixing has it in its matrices.
        mixing: None, or in the place of both.
    """

    smoothing: torch.Tensor | None = None
    block: int = 0
    mixing: Mixing | None = None

    def __bool__(self) -> bool:
        """Return whether anything is changed."""
        return self.smoothing is not None or self.block > 0 or self.mixing is not None

    def on(self, device: torch.device) -> Maps:
        """Return the same maps on a device."""
        m = self.mixing
        return Maps(
            None if self.smoothing is None else self.smoothing.to(device),
            self.block,
            None if m is None else Mixing(m.store.to(device), m.restore.to(device), m.ask.to(device)),
        )

    def store(self, x: torch.Tensor, multiply: Multiply = multiply) -> torch.Tensor:
        """Return what is stored for `x`: `R (x / m)`, or `x M^-1 R`.

        Args:
            x: `[..., H, D]`, any float dtype; taken as fp32.
            multiply: A backend's own, which gives the same bits.
        """
        import torch

        x = x.float()
        if not self:
            return x
        x = torch.where(x.isfinite(), x.clamp(-LARGEST_ELEMENT, LARGEST_ELEMENT), x)
        if self.mixing is not None:
            return multiply(x, self.mixing.store)
        if self.smoothing is not None:
            x = x / self.smoothing
        return rotate(x, self.block) if self.block else x

    def restore(self, x: torch.Tensor, multiply: Multiply = multiply) -> torch.Tensor:
        """Undo `store` on decoded vectors, or on an attention output.

        Args:
            x: fp32 `[..., H, D]`; of an output also `[..., Q, D]`, a multiple of H.
        """
        if self.mixing is not None:
            return multiply(x, self.mixing.restore)
        if self.block:
            x = rotate(x, self.block)
        return x if self.smoothing is None else x * _for_heads(self.smoothing, x.shape[-2])

    def ask(self, q: torch.Tensor, multiply: Multiply = multiply) -> torch.Tensor:
        """Return the query whose dot product with a stored key is the original one: `R (q * m)`, or `q M^T R`.

        Args:
            q: `[..., Q, D]`, any float dtype; taken as fp32. Query head i reads KV head `i // (Q / H)`.
        """
        q = q.float()
        if self.mixing is not None:
            return multiply(q, self.mixing.ask)
        if self.smoothing is not None:
            q = q * _for_heads(self.smoothing, q.shape[-2])
        return rotate(q, self.block) if self.block else q


def _for_heads(constants: torch.Tensor, num_heads: int) -> torch.Tensor:
    return constants.repeat_interleave(num_heads // constants.shape[0], 0)
