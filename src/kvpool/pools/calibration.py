"""Constants from a sample of real vectors. Knows no model: the sample is what a layer wrote."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvpool.codecs.rotation import LARGEST_SMOOTHING, SMALLEST_SMOOTHING, transform
from kvpool.errors import PlanError
from kvpool.pools.constants import SMALLEST_SCALE, Constants

#: A channel is taken as at least this part of the largest one, so that a silent channel is not blown up to noise.
SMALLEST_CHANNEL = 2.0**-10
#: Parts that queries are multiplied with; a latent is a value as well.
KEY_PARTS = ("k", "latent", "rope")


def smoothing_from(x: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
    """Return smoothing constants for keys.

    Without queries every channel gets the same largest magnitude, which is best for one scale a vector when nothing
    is known of what will be asked: for a given scale the error of a logit grows with the sum of the squared constants,
    and none may be below its channel's amax.

    With queries, `m = sqrt(mean|k| / mean|q|)`: then `|k/m|` and `|q*m|` are alike, and by Cauchy and Schwarz the
    product of their norms, which is what the error of a logit is made of once a rotation has spread both, is least.
    Means of magnitudes, not of squares: a few tokens that all others attend to are tens of times larger.

    Args:
        x: `[T, H, D]`, finite.
        queries: `[T, Q, D]`, finite.

    Returns:
        fp32 `[H, D]`, geometric mean 1 in each head.
    """
    if queries is None:
        m = x.float().abs().amax(0)
    else:
        num_heads = x.shape[1]
        asked = queries.float().abs().reshape(queries.shape[0], num_heads, -1, queries.shape[-1]).mean((0, 2))
        stored = x.float().abs().mean(0)
        m = (_at_least(stored) / _at_least(asked)).sqrt()
    m = _at_least(m)
    return (m / m.log().mean(-1, keepdim=True).exp()).clamp(SMALLEST_SMOOTHING, LARGEST_SMOOTHING)


def _at_least(channels: torch.Tensor) -> torch.Tensor:
    """Raise silent channels to a small part of the largest of their head."""
    return channels.clamp(min=SMALLEST_CHANNEL * channels.amax(-1, keepdim=True)).clamp(min=SMALLEST_SCALE)


def calibrate(
    constants: Constants,
    x: torch.Tensor,
    *,
    queries: torch.Tensor | None = None,
    smoothing: bool = False,
    rotation: bool | None = None,
) -> None:
    """Set the constants of a part from a sample: smoothing and rotation when asked, the scale when the codec needs one.

    The scale is the sample's amax (after smoothing and rotation) over the largest code; later elements beyond it
    saturate and are counted.

    Args:
        constants: Of the part.
        x: `[T, H, D]`, any float dtype.
        queries: `[T, Q, D]` asked of these keys; smoothing is better with them.
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
    constants.set(smoothing=smoothing_from(x, queries) if smoothing else None, rotation=rotation)
    if constants.needs_scale:
        stored = transform(x, constants.smoothing, constants.rotation_block)
        amax = float(stored.abs().max()) * (1 + 2.0**-20)  # rounding must not put amax beyond the largest code
        constants.set(scale=max(amax / constants.largest_code, SMALLEST_SCALE))


def calibrate_layer(
    parts: Mapping[str, Constants],
    tensors: Mapping[str, torch.Tensor],
    *,
    smoothing: bool = False,
    rotation: bool | None = None,
) -> None:
    """Set the constants of a layer from what it wrote.

    Args:
        parts: The layer's constants by part.
        tensors: `k` and `v`, or `latent` and `rope`, each `[T, H, D]`; and what was asked, `q` of `[T, Q, D]`.
        smoothing: Measure and set smoothing of the quantised keys.
        rotation: Set rotation of the quantised parts.

    Raises:
        PlanError: The layer stores no such part, or a sample is of no use.
    """
    samples = {part: x for part, x in tensors.items() if part != "q"}
    if "rope" in samples and "rope" not in parts:  # one codec, one vector
        samples["latent"] = torch.cat([samples["latent"], samples.pop("rope")], -1)
    begin = 0
    for part in sorted(samples):  # a key may lie in two parts: the latent, then the rope part
        if part not in parts:
            raise PlanError(f"this layer stores no {part!r}; it stores {', '.join(sorted(parts)) or 'nothing'}")
        x, queries = samples[part], None
        is_key = part in KEY_PARTS
        if is_key and "q" in tensors:
            queries = tensors["q"][..., begin : begin + x.shape[-1]]
            begin += x.shape[-1]
        quantised = parts[part].quantised
        calibrate(
            parts[part],
            x,
            queries=queries,
            smoothing=smoothing and is_key and quantised,
            rotation=rotation if quantised else None,
        )
