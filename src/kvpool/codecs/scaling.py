"""Scales of vectors: amax, the scale from it, its reciprocal, one a segment. Knows no element format.

The order of operations is part of every format (DESIGN section 7): one division for the scale, one for its
reciprocal, one multiplication an element, each rounded to fp32.
"""

from __future__ import annotations

import torch

from kvpool.codecs.base import Counts, Vector
from kvpool.codecs.floats import SMALLEST_SCALE

#: The largest bf16. Beyond it (fp32 only) the rounding of a scale could make a decoded element infinite.
LARGEST_AMAX = 2.0**128 - 2.0**120


def divide(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """Return fl32(a / b). A Python scalar as divisor would become a multiplication by its reciprocal on CUDA."""
    return a / torch.as_tensor(b, dtype=torch.float32, device=a.device).expand_as(a)


def reciprocal(s: torch.Tensor) -> torch.Tensor:
    """Return fl32(1 / s), and 0 where s is 0."""
    return torch.where(s == 0, 0.0, divide(torch.ones_like(s), s))


def segment_amax(x: torch.Tensor, vector: Vector) -> torch.Tensor:
    """Return the largest magnitude of every segment, `[..., D]` to `[..., S]`; NaN where it is not finite.

    It is at most `LARGEST_AMAX`.
    """
    segments = vector.segments
    if len(set(segments)) == 1:
        amax = in_blocks(x.abs(), segments[0]).amax(-1)
    else:
        amax = torch.stack([part.abs().amax(-1) for part in torch.split(x, list(segments), -1)], -1)
    return torch.where(amax.isfinite(), amax.clamp(max=LARGEST_AMAX), torch.nan)


def spread(values: torch.Tensor, vector: Vector) -> torch.Tensor:
    """Repeat the value of every segment over its elements, `[..., S]` to `[..., D]`."""
    lengths = torch.tensor(vector.segments, device=values.device)
    return values.repeat_interleave(lengths, -1, output_size=vector.dim)


def scale_from_amax(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return `max(amax / largest, 2^-126)`, 0 where amax is 0, NaN where it is NaN."""
    return torch.where(amax == 0, 0.0, divide(amax, largest).clamp(min=SMALLEST_SCALE))


def constant(scale: float, like: torch.Tensor) -> torch.Tensor:
    """Return a constant scale as a 0-dim fp32 tensor beside `like`."""
    return torch.tensor(scale, dtype=torch.float32, device=like.device)


def count_elements(
    counts: Counts | None, x: torch.Tensor, y: torch.Tensor, codes: torch.Tensor, largest: float
) -> None:
    """Count what a constant scale without block scales lost.

    Args:
        counts: Added to; None does nothing.
        x: The elements given.
        y: The same in units of the scale, before rounding.
        codes: What is stored, decoded or not: anything that is 0 exactly where the stored value is.
        largest: Largest code.
    """
    if counts is None:
        return
    finite = x.isfinite()
    counts.saturated += int((finite & (y.abs() > largest)).sum())
    counts.flushed += int((finite & (x != 0) & (codes == 0)).sum())


def quantise(x: torch.Tensor, vector: Vector, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements in units of their scale, and the scales.

    Args:
        x: `[..., D]`.
        vector: Its segments.
        largest: Largest code Q.

    Returns:
        (`fl32(x * fl32(1/s))` of `[..., D]`, zero where a segment holds a NaN or an infinity; s of `[..., S]`, or
        `[...]` for one segment: 0 for a segment of zeros, NaN for a segment that is not finite).
    """
    x = x.float()
    s = scale_from_amax(segment_amax(x, vector), largest)
    y = x * spread(reciprocal(s), vector)
    # A segment of zeros has codes 0 and not -0; one that is not finite has its NaN in the scale.
    y = torch.where(spread(s > 0, vector), y, 0.0)
    return y, (s if len(vector.segments) > 1 else s[..., 0])


def dequantise(values: torch.Tensor, s: torch.Tensor, vector: Vector) -> torch.Tensor:
    """Return `fl32(values * s)`, with one scale a segment (`[..., S]`, or `[...]` for one)."""
    return values * spread(s if len(vector.segments) > 1 else s[..., None], vector)


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """View `[..., D]` as `[..., D/size, size]`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
