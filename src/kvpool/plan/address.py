"""The address of one element as the chain of products it is made of. Knows planes, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvpool.dtypes import dtype
from kvpool.errors import PlanError
from kvpool.plan.geometry import GroupPlan, PlanePlan, PoolPlan

#: What an axis counts.
AXIS_NAMES = {"B": "block", "L": "layer", "F": "part", "H": "head", "N": "token", "C": "container"}


@dataclass(frozen=True, slots=True)
class Term:
    """One product of an address: an index along an axis times the axis's stride in bytes."""

    axis: str
    index: int
    stride: int


@dataclass(frozen=True, slots=True)
class PlaneAddress:
    """Where a container of one plane lies in the group's slab.

    Attributes:
        plane: `data`, `scale` or `block_scale`.
        dtype: Container type.
        base: Bytes from the start of the slab to element zero of the plane.
        terms: The products, in the order of the axes in memory.
        nibble: Which half of the container holds the element (0 low, 1 high); None for whole containers.
    """

    plane: str
    dtype: str
    base: int
    terms: tuple[Term, ...]
    nibble: int | None = None

    @property
    def offset(self) -> int:
        """Bytes from the start of the slab: `base + sum(index * stride)`."""
        return self.base + sum(term.index * term.stride for term in self.terms)

    def __str__(self) -> str:
        products = [f"{AXIS_NAMES[t.axis]} {t.index} * {t.stride}" for t in self.terms]
        half = "" if self.nibble is None else f", {('low', 'high')[self.nibble]} nibble"
        return f"{self.plane} ({self.dtype}): {' + '.join([str(self.base), *products])} = {self.offset}{half}"


@dataclass(frozen=True, slots=True)
class ElementAddress:
    """Where one element lies, and the scales it is decoded with.

    Attributes:
        group: Name of the group whose slab this is.
        part: `k`, `v`, `latent`, `rope`, `index` or the name of a state.
        codec: The stored format.
        layout: The order of the axes.
        data: The element.
        scales: One entry for each scale plane.
    """

    group: str
    part: str
    codec: str
    layout: str
    data: PlaneAddress
    scales: tuple[PlaneAddress, ...]

    @property
    def offset(self) -> int:
        """Bytes from the start of the slab to the element's container."""
        return self.data.offset

    def __str__(self) -> str:
        lines = [f"{self.part} in the slab of group {self.group!r}, codec {self.codec}, layout {self.layout}"]
        return "\n".join(lines + [f"  {plane}" for plane in (self.data, *self.scales)])

    def to_dict(self) -> dict[str, Any]:
        """Return the address as plain data."""
        planes = [
            {
                "plane": p.plane,
                "dtype": p.dtype,
                "base": p.base,
                "terms": [{"axis": t.axis, "index": t.index, "stride": t.stride} for t in p.terms],
                "offset": p.offset,
                "nibble": p.nibble,
            }
            for p in (self.data, *self.scales)
        ]
        place = {"group": self.group, "part": self.part, "codec": self.codec, "layout": self.layout}
        return {**place, "offset": self.offset, "planes": planes}


def element_address(
    group: GroupPlan, pool: PoolPlan, layer: int, factor: int, block: int, head: int, token: int, dim: int
) -> ElementAddress:
    """Return the address of an element.

    Args:
        group: The group of the pool.
        pool: The pool.
        layer: Index on the L axis.
        factor: Index on the F axis.
        block: Block id.
        head: KV head on this rank.
        token: Token in the block.
        dim: Element of the vector.

    Raises:
        PlanError: An index is out of range.
    """
    for name, value, extent in (
        ("block", block, group.num_blocks_reserved),
        ("head", head, pool.num_heads),
        ("token", token, group.tokens_per_block),
        ("dim", dim, pool.vector.dim),
    ):
        if type(value) is not int or not 0 <= value < extent:
            raise PlanError(f"{name} must be between 0 and {extent - 1} in this plan, got {value!r}")

    def place(plane: PlanePlan) -> PlaneAddress:
        index = {"B": block, "L": layer, "F": factor, "H": head, "N": token}
        codes = dtype(plane.dtype).codes
        if len(plane.shape) == 6:
            index["C"] = _container(plane, pool, dim)
        strides = dict(zip("BLFHNC", plane.strides, strict=False))
        terms = tuple(Term(axis, index[axis], strides[axis]) for axis in plane.order)
        return PlaneAddress(plane.name, plane.dtype, plane.offset, terms, dim % codes if codes > 1 else None)

    first, *others = pool.planes
    return ElementAddress(
        group.name, pool.parts[factor], pool.codec, pool.layout, place(first), tuple(place(p) for p in others)
    )


def _container(plane: PlanePlan, pool: PoolPlan, dim: int) -> int:
    """Container of element `dim`: of its segment for scales, of its equal part of the vector otherwise."""
    if plane.name == "scale":
        return next(i for i, end in enumerate(accumulate(pool.vector.segments)) if dim < end)
    return dim * plane.shape[5] // pool.vector.dim
