"""The physical ledger: slabs of memory and strided views of them. Knows no sequence and no prefix."""

from __future__ import annotations

from kvpool.codecs import get_codec
from kvpool.errors import PlanError
from kvpool.plan import Plan
from kvpool.pools.constants import Constants
from kvpool.pools.layer import LayerParts
from kvpool.pools.slab import Slab
from kvpool.pools.views import Part, Plane, View, view

__all__ = ["Constants", "LayerParts", "Part", "Plane", "Pools", "Slab", "View"]


class Pools:
    """All memory of a plan on one device.

    Args:
        plan: Shapes, offsets and strides.
        device: `cpu`.
        touch: Write every committed byte once, so that no page is faulted in later.
    """

    def __init__(self, plan: Plan, device: str = "cpu", *, touch: bool = False) -> None:
        self.plan = plan
        self.device = device
        self.slabs = tuple(Slab(group, device, touch=touch) for group in plan.groups)
        self._parts: dict[tuple[int, str], Part] = {}

    def part(self, layer: int, name: str) -> Part:
        """Return a part of a layer; the same object every time, also for layers that share it.

        Raises:
            PlanError: The layer stores no such part.
        """
        layer = self.plan.source_layer(layer)
        if (layer, name) not in self._parts:
            self._parts[layer, name] = self._make_part(layer, name)
        return self._parts[layer, name]

    @property
    def constants(self) -> dict[tuple[int, str], Constants]:
        """The constants of every part of every layer, by (layer, part)."""
        pools = (pool for group in self.plan.groups for pool in group.pools)
        keys = sorted((layer, name) for pool in pools for layer in pool.layers for name in pool.parts)
        return {key: self.part(*key).constants for key in keys}

    def view(self, layer: int, part: str, heads: slice = slice(None)) -> View:
        """Return the planes of the pool that holds a part of a layer (K and V together where they share one).

        Args:
            layer: Model layer.
            part: `k`, `v`, `latent`, `rope`, `index`, or a state's name; `kv` is `k`'s pool when it holds both.
            heads: KV heads wanted.
        """
        group, pool, index, _ = self.plan.find(layer, "k" if part == "kv" else part)
        if part == "kv" and pool.kv_factor != 2:
            raise PlanError(f"layer {layer} keeps K and V in two pools; view 'k' and 'v'")
        return view(self.slabs[group], pool, index, heads)

    def _make_part(self, layer: int, name: str) -> Part:
        group, pool, index, factor = self.plan.find(layer, name)
        slab = self.slabs[group]
        planes = {}
        for plane in pool.planes:
            tensor = slab.plane(plane)[:, index, factor]
            strides = (plane.strides[0], *plane.strides[3:])
            address = slab.address + plane.offset + index * plane.strides[1] + factor * plane.strides[2]
            planes[plane.name] = Plane(tensor, address, strides)
        codec = get_codec(pool.codec)
        return Part(
            group=group,
            layer=layer,
            name=name,
            codec=codec,
            vector=pool.vector,
            num_heads=pool.num_heads,
            tokens_per_block=self.plan.groups[group].tokens_per_block,
            planes=planes,
            constants=Constants(codec, pool.vector, pool.num_heads, layer, name),
        )
