"""Constants from a sample of real vectors. Knows no model: the sample is what a layer wrote."""

from __future__ import annotations

import torch

from kvpool.codecs.rotation import LARGEST_SMOOTHING, SMALLEST_SMOOTHING, transform
from kvpool.errors import PlanError
from kvpool.pools.constants import SMALLEST_SCALE, Constants

#: A channel is taken as at least this part of the largest one, so that a silent channel is not blown up to noise.
SMALLEST_CHANNEL = 2.0**-10


def smoothing_from(x: torch.Tensor) -> torch.Tensor:
    """Return the smoothing constants that give every channel of the sample the same largest magnitude.

    Dividing each channel by its amax is best for formats with one scale a vector: for a given scale, the error of a
    logit grows with the sum of the squared constants, and none may be below its channel's amax.

    Args:
        x: `[T, H, D]`, finite.

    Returns:
        fp32 `[H, D]`, geometric mean 1 in each head.
    """
    amax = x.float().abs().amax(0)
    amax = amax.clamp(min=SMALLEST_CHANNEL * amax.amax(-1, keepdim=True)).clamp(min=SMALLEST_SCALE)
    return (amax / amax.log().mean(-1, keepdim=True).exp()).clamp(SMALLEST_SMOOTHING, LARGEST_SMOOTHING)


def calibrate(constants: Constants, x: torch.Tensor, *, smoothing: bool = False, rotation: bool | None = None) -> None:
    """Set the constants of a part from a sample: smoothing and rotation when asked, the scale when the codec needs one.

    The scale is the sample's amax (after smoothing and rotation) over the largest code; later elements beyond it
    saturate and are counted.

    Args:
        constants: Of the part.
        x: `[T, H, D]`, any float dtype.
        smoothing: Measure and set smoothing.
        rotation: Set rotation; None leaves it.

    Raises:
        PlanError: The sample is empty, all zero or not finite, or the constants are frozen.
    """
    x = x.detach().float().cpu()
    if x.shape[0] == 0 or not bool(x.isfinite().all()) or not bool(x.any()):
        raise PlanError(
            f"the calibration sample of {constants.owner} is empty, all zero or not finite (shape {tuple(x.shape)});"
            " give real keys and values"
        )
    constants.set(smoothing=smoothing_from(x) if smoothing else None, rotation=rotation)
    if constants.needs_scale:
        stored = transform(x, constants.smoothing, constants.rotation_block)
        amax = float(stored.abs().max()) * (1 + 2.0**-20)  # rounding must not put amax beyond the largest code
        constants.set(scale=max(amax / constants.largest_code, SMALLEST_SCALE))
