"""Constants from a sample of real vectors. Knows no model: the sample is what a layer wrote."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvpool.codecs.maps import LARGEST_SMOOTHING, SMALLEST_SMOOTHING
from kvpool.errors import PlanError
from kvpool.pools.constants import SMALLEST_SCALE, Constants

#: A channel is taken as at least this part of the largest one, so that a silent channel is not blown up to noise.
SMALLEST_CHANNEL = 2.0**-10
#: This part of the mean variance is added to every channel before mixing is made of it: what a sample did not show may
#: come in the text to be stored.
RIDGE = 0.01
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


def mixing_from(x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return mixing matrices for keys: those for which the error of a logit is least.

    A code's error grows with the vector it stands for, and a rotation spreads it evenly: the error of a logit then is
    a constant times `tr(S K S) tr(S^-1 Q S^-1)`, with the second moments K and Q of keys and queries, `k S` being
    stored and `q S^-1` asked. It is least where both moments become equal: `S^2` is the geometric mean of `K^-1` and Q.
    Of all maps with this product the symmetric one leaves channels closest to where they were; where they do not vary
    together it is smoothing. (Sorted by size instead, the large directions meet alike rows of a Hadamard matrix, and
    their errors add up.)

    Args:
        x: `[T, H, D]`, finite.
        queries: `[T, Q, D]`, finite.

    Returns:
        fp32 `M [H, D, D]`, `M = S^-1`: `k M^-1` is stored, `q M^T` asked.
    """
    num_heads, dim = x.shape[1:]
    k = x.double().transpose(0, 1)
    q = queries.double().reshape(queries.shape[0], num_heads, -1, dim).transpose(0, 1).flatten(1, 2)
    keys, asked = (_with_ridge(y.mT @ y / y.shape[1]) for y in (k, q))
    root, unroot = _power(keys, 0.5), _power(keys, -0.5)
    return _power(unroot @ _power(root @ asked @ root, 0.5) @ unroot, -0.5).float()


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return a power of symmetric positive matrices `[H, D, D]`."""
    values, vectors = torch.linalg.eigh(matrix)
    raised: torch.Tensor = (vectors * values.pow(exponent)[:, None]) @ vectors.mT
    return raised


def _with_ridge(moments: torch.Tensor) -> torch.Tensor:
    """Add a part of the mean of each head's diagonal to its diagonal; `[H, D, D]`."""
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=SMALLEST_SCALE)
    return moments + (RIDGE * mean)[:, None, None] * torch.eye(moments.shape[-1], dtype=moments.dtype)


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
    mixing: bool = False,
) -> None:
    """Set the constants of a part from a sample: the maps that are asked for, the scale when the codec needs one.

    The scale is the sample's amax (after the maps) over the largest code; later elements beyond it
    saturate and are counted.

    Args:
        constants: Of the part.
        x: `[T, H, D]`, any float dtype.
        queries: `[T, Q, D]` asked of these keys; smoothing is better with them.
        smoothing: Measure and set smoothing.
        rotation: Set rotation; None leaves it.
        mixing: Measure and set mixing; needs queries.

    Raises:
        PlanError: The sample is empty, all zero or not finite, without the queries it needs, or the constants are
            frozen.
    """
    x = x.detach().float().cpu()
    if x.shape[0] == 0 or not bool(x.isfinite().all()) or not bool(x.any()):
        raise PlanError(
            f"the calibration sample of {constants.owner} is empty, all zero or not finite (shape {tuple(x.shape)});"
            " give real keys and values"
        )
    if mixing and queries is None:
        raise PlanError(f"mixing of {constants.owner} is measured on keys and queries; give q of the same text, too")
    constants.set(
        smoothing=smoothing_from(x, queries) if smoothing else None,
        rotation=rotation,
        mixing=mixing_from(x, queries.detach().float().cpu()) if mixing and queries is not None else None,
    )
    if constants.needs_scale:
        stored = constants.maps.store(x)
        amax = float(stored.abs().max()) * (1 + 2.0**-20)  # rounding must not put amax beyond the largest code
        constants.set(scale=max(amax / constants.largest_code, SMALLEST_SCALE))


def calibrate_layer(
    parts: Mapping[str, Constants],
    tensors: Mapping[str, torch.Tensor],
    *,
    smoothing: bool = False,
    rotation: bool | None = None,
    mixing: bool = False,
) -> None:
    """Set the constants of a layer from what it wrote.

    Args:
        parts: The layer's constants by part.
        tensors: `k` and `v`, or `latent` and `rope`, each `[T, H, D]`; and what was asked, `q` of `[T, Q, D]`.
        smoothing: Measure and set smoothing of the quantised keys.
        rotation: Set rotation of the quantised parts.
        mixing: Measure and set mixing of the quantised keys.

    Raises:
        PlanError: The layer stores no such part, or a sample is of no use; or a latent was to be mixed.
    """
    if mixing and "latent" in parts:
        raise PlanError(
            f"mixing is for keys, and {parts['latent'].owner} is a value as well; use smoothing and rotation"
        )
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
            mixing=mixing and part == "k" and quantised,
        )
