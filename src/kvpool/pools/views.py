"""Parts and views: K, V, latent, rope part, indexer keys or a state of one layer, as strided views of its planes.

A part is what our kernels take; a view is what other libraries' kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpool.codecs import Codec, Vector
from kvpool.errors import LayoutError
from kvpool.kinds import LatentKind
from kvpool.plan import PoolPlan
from kvpool.pools.constants import Constants
from kvpool.pools.slab import Slab


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of a part.

    Attributes:
        tensor: `[B, H, N, C]`, or `[B, H, N]` for one value a vector; a view of the slab, never a copy.
        address: Of element zero.
        strides: Bytes, in the order of `tensor`'s axes.
    """

    tensor: torch.Tensor
    address: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a kernel needs to know of one part of one layer. There is one object a part, compared by identity.

    Attributes:
        group: Index of the group, hence of the step's tables.
        name: `k`, `v`, `latent`, `rope`, `index`, or a state's name.
        planes: By plane name, `data` first.
        constants: Numbers the codec needs and does not store; frozen by the first write.
    """

    group: int
    layer: int
    name: str
    codec: Codec
    vector: Vector
    num_heads: int
    tokens_per_block: int
    planes: dict[str, Plane]
    constants: Constants


@dataclass(frozen=True, slots=True)
class View:
    """The planes of one layer's pool in the order its layout has in memory, for other libraries' kernels.

    Attributes:
        layout: `HND` or `NHD`.
        data: `[B, F, H, N, C]` (HND) or `[B, F, N, H, C]` (NHD) containers; strided in B, never a copy.
        scale: `[B, F, H, N]` or `[B, F, H, N, S]` fp32, or None.
        block_scale: In the order of `data`, or None.
        rank: Elements of the latent proper, 0 for other kinds.
    """

    layout: str
    data: torch.Tensor
    scale: torch.Tensor | None
    block_scale: torch.Tensor | None
    rank: int = 0

    @property
    def latent(self) -> torch.Tensor:
        """`[B, N, rank]`: the latent proper, for pools that hold it."""
        if not self.rank:
            raise LayoutError("this pool holds no latent")
        return self.data[:, 0].flatten(1, 2)[..., : self.rank]

    @property
    def rope(self) -> torch.Tensor:
        """`[B, N, rope]`: the rope part, where it stands behind its latent in one pool."""
        if not self.rank or self.data.shape[-1] == self.rank:
            raise LayoutError("this pool holds no rope part; view 'rope' when it has a codec of its own")
        return self.data[:, 0].flatten(1, 2)[..., self.rank :]


def view(slab: Slab, pool: PoolPlan, index: int, heads: slice = slice(None)) -> View:
    """Return the planes of one layer of a pool.

    Args:
        slab: The group's memory.
        pool: One of the group's pools.
        index: Place of the layer on the L axis.
        heads: KV heads wanted.
    """
    planes = {}
    for plane in pool.planes:
        tensor = slab.plane(plane)[:, index, :, heads]  # [B, F, H, N(, C)]
        axes = [a for a in plane.order if a not in "BL"]
        order = [0, *(1 + "FHNC".index(a) for a in axes)]
        planes[plane.name] = tensor.permute(order)
    rank = pool.kind.kv_lora_rank if isinstance(pool.kind, LatentKind) and "latent" in pool.parts else 0
    return View(pool.layout, planes["data"], planes.get("scale"), planes.get("block_scale"), rank)
