"""The pools of a plan with the numbers that a layer's codecs need and do not store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from kvpool.backends import get_backend
from kvpool.codecs import Counts
from kvpool.errors import UnsupportedError
from kvpool.plan import Plan
from kvpool.pools import Constants, Pools
from kvpool.pools.calibration import calibrate_layer
from kvpool.pools.constants import apply_scales, read_scales, set_layer, set_unit_scales
from kvpool.support import refusal


class LayerConstants:
    """Pools, the backend that works on them, and their constants by layer: given, read from a checkpoint or measured.

    Args:
        plan: Every shape and size.
        device: Where the pools are.
        backend: `auto`, or a name; a name never falls back.
        num_threads: Of its kernels; None leaves it to the backend.
        touch: Fault all committed memory in now, so that no step does.

    Raises:
        UnsupportedError: The backend cannot work on a pool of the plan.
    """

    def __init__(self, plan: Plan, device: str, backend: str, *, num_threads: int | None, touch: bool) -> None:
        self.plan = plan
        self.device = device
        self.backend = get_backend(backend, device, num_threads)
        reason = refusal(self.backend.name, plan)
        if reason:
            raise UnsupportedError(f"backend {self.backend.name!r} cannot work on this plan: {reason}")
        self.pools = Pools(plan, device, touch=touch)

    def set_constants(
        self,
        layer: int,
        *,
        k: float | None = None,
        v: float | None = None,
        latent: float | None = None,
        rope: float | None = None,
        smoothing: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        rotation: bool | Mapping[str, bool] | None = None,
        mixing: torch.Tensor | None = None,
    ) -> None:
        """Set numbers the layer's codecs need and do not store; the first write freezes them.

        Args:
            layer: Model layer.
            k: Decode scale of the keys, for codecs with a constant one.
            v: Decode scale of the values.
            latent: Decode scale of the latent.
            rope: Decode scale of the rope part, when it has a codec of its own.
            smoothing: `[H, D]`, divided out of the keys (or the latent) at write and folded into q at read; or a
                mapping from part to tensor.
            rotation: Rotate the quantised parts; or a mapping from part to bool.
            mixing: `M [H, D, D]`: keys are stored as `k M^-1` and asked by `q M^T`; in the place of smoothing.

        Raises:
            PlanError: A value is out of range or of no use to the codec, or the constants are frozen.
        """
        scales = {"k": k, "v": v, "latent": latent, "rope": rope}
        set_layer(self._constants(layer), scales, smoothing, rotation, mixing)

    def set_scales(self, scales: str | Path | Mapping[tuple[int, str], float]) -> None:
        """Set the scale of every part whose codec needs one.

        Args:
            scales: `unit` for 1.0 wherever none is set; a safetensors checkpoint with `k_scale` and `v_scale`; or
                decode scales by (layer, `k` or `v`).

        Raises:
            PlanError: The checkpoint holds none, or a value is refused.
            PlanMismatch: A part that needs a scale has none there.
        """
        if scales == "unit":
            set_unit_scales(self.pools.constants)
        else:
            apply_scales(self.pools.constants, scales if isinstance(scales, Mapping) else read_scales(scales))

    def calibrate(
        self,
        batch: Mapping[int, Mapping[str, torch.Tensor]],
        *,
        smoothing: bool = False,
        rotation: bool | None = None,
        mixing: bool = False,
    ) -> None:
        """Measure constants on what layers wrote for a piece of real text.

        Args:
            batch: By layer: `k` and `v`, or `latent` and `rope`, each `[T, H, D]`; `q` (`[T, Q, D]`) makes the
                smoothing better, and mixing needs it.
            smoothing: Measure smoothing of the keys, too.
            rotation: Set rotation of the quantised parts before the scales are measured.
            mixing: Measure mixing of the keys; with rotation it is the best there is for 4-bit keys.

        Raises:
            PlanError: A sample is empty or not finite, a layer stores no such part, or the constants are frozen.
        """
        for layer, tensors in batch.items():
            calibrate_layer(self._constants(layer), tensors, smoothing=smoothing, rotation=rotation, mixing=mixing)

    def lost(self) -> dict[tuple[int, str], Counts]:
        """Return what constant scales lost so far, by (layer, part): saturated, flushed and non-finite elements."""
        constants = self.pools.constants
        return {key: self.backend.counts(self.pools.part(*key)) for key, c in constants.items() if c.needs_scale}

    def _constants(self, layer: int) -> dict[str, Constants]:
        source = self.plan.source_layer(layer)
        return {part: constants for (at, part), constants in self.pools.constants.items() if at == source}
