"""How a stored format and its options are written in one word: `fp8`, `fp8/nvfp4-token`, `int8-tensor:unit`,
`nvfp4-token+mixing+rotation`, `bf16>fp8` (below the device: fp8). Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvpool.cache import KVCache
from kvpool.codecs import get_codec
from kvpool.errors import PlanError

OPTIONS = ("smoothing", "rotation", "mixing")
#: The scales that constant-scale codecs get: measured on other text, or 1.0.
SCALES = ("calibrated", "unit")


@dataclass(frozen=True, slots=True)
class Variant:
    """A stored format with its options.

    Attributes:
        name: As it was written.
        k: Codec of keys, latents and rope parts.
        v: Codec of values.
        smoothing: Smooth the keys.
        rotation: Rotate keys and values.
        mixing: Mix the channels of the keys.
        scales: `calibrated` or `unit`, for codecs with a constant scale.
        below: Codec that blocks have below the device, whence they came back; None when they never left it.
    """

    name: str
    k: str
    v: str
    smoothing: bool = False
    rotation: bool = False
    mixing: bool = False
    scales: str = "calibrated"
    below: str | None = None

    @property
    def codec(self) -> str | dict[str, str]:
        """The `codec` argument of `make_plan`."""
        return self.k if self.k == self.v else {"*": self.k, "v": self.v}

    @property
    def at_rest(self) -> Variant:
        """The format below the device, as a format of its own."""
        return self if self.below is None else Variant(self.name, self.below, self.below)

    @property
    def needs_calibration(self) -> bool:
        """True when constants have to be measured before the first write."""
        constant = get_codec(self.k).constant_scale or get_codec(self.v).constant_scale
        return self.smoothing or self.mixing or (constant and self.scales == "calibrated")

    def prepare(self, cache: KVCache, sample: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Set the constants of a new cache.

        Args:
            cache: Nothing written yet.
            sample: What layers wrote for calibration text: by layer, tensors by part.
        """
        rotation = self.rotation or None
        if self.scales == "unit":
            cache.set_scales("unit")
        if self.needs_calibration:
            cache.calibrate(sample, smoothing=self.smoothing, rotation=rotation, mixing=self.mixing)
        elif rotation:
            for layer in range(cache.plan.spec.num_layers):
                cache.set_constants(layer, rotation=True)


def parse_variant(text: str) -> Variant:
    """Read `CODEC` or `K/V`, then any of `:unit`, `+smoothing`, `+rotation`, `+mixing`; `>CODEC` below the device.

    Raises:
        PlanError: A codec or an option is unknown, or an option is of no use to the codec.
    """
    device, arrow, below = text.strip().partition(">")
    if arrow and get_codec(below).constant_scale:
        raise PlanError(f"{text!r}: tiers have no constant scales; write a codec that stores its own behind >")
    word, *options = device.split("+")
    codecs, _, scales = word.partition(":")
    k, slash, v = codecs.partition("/")
    v = v if slash else k
    unknown = [o for o in options if o not in OPTIONS] + ([scales] if scales and scales not in SCALES else [])
    if unknown or len(set(options)) != len(options):
        raise PlanError(
            f"{text!r} has the option {(unknown or options)[0]!r}; write CODEC or K/V, then :unit, +smoothing,"
            " +rotation, +mixing, each at most once"
        )
    parts = {"keys": get_codec(k), "values": get_codec(v)}
    if scales and not any(c.constant_scale for c in parts.values()):
        raise PlanError(f"{text!r}: {codecs} has no constant scale to set; leave :{scales} out")
    if options and not (parts["keys"].quantised or parts["values"].quantised):
        raise PlanError(f"{text!r}: {codecs} is not quantised, so {options[0]} cannot help it; leave it out")
    if {"smoothing", "mixing"} <= set(options):
        raise PlanError(f"{text!r}: mixing includes smoothing; write one of them")
    given = {option: option in options for option in OPTIONS}
    return Variant(text.strip(), k, v, **given, scales=scales or "calibrated", below=below or None)
