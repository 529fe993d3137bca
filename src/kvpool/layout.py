"""Axis orders, strides and the one address formula. Knows no codec, no model and no framework.

Every plane is logically `[B, L, F, H, N, C]`: block, layer, K/V factor, KV head, token in block,
container. A layout is an order of these axes in memory. All strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool.errors import PlanError

AXES = "BLFHNC"


@dataclass(frozen=True, slots=True)
class Layout:
    """An order of the axes in memory, outermost first.

    Attributes:
        name: `HND` or `NHD`.
        order: The six axis letters; `B` first and `C` last.
        vector_order: The same for planes with one value a vector (no `C`): token-contiguous, since
            kernels load the scales of 16 tokens at once.
    """

    name: str
    order: str
    vector_order: str = "BLFHN"


LAYOUTS: dict[str, Layout] = {
    "HND": Layout("HND", "BLFHNC"),
    "NHD": Layout("NHD", "BLFNHC"),
}


def layout(name: str) -> Layout:
    """Return the layout called `name`.

    Raises:
        PlanError: The name is unknown.
    """
    try:
        return LAYOUTS[name]
    except KeyError:
        raise PlanError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}") from None


def inner_strides(order: str, sizes: Mapping[str, int], itemsize: int) -> dict[str, int]:
    """Byte strides of the axes inside one layer of one block (`F`, `H`, `N`, `C`), dense in `order`.

    Args:
        order: Axis letters, outermost first; `B` and `L` are ignored.
        sizes: Extent of each axis.
        itemsize: Bytes of one container.
    """
    strides: dict[str, int] = {}
    step = itemsize
    for axis in reversed([a for a in order if a not in "BL"]):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def address(base: int, indices: Sequence[int], strides: Sequence[int]) -> int:
    """Return `base + sum(index * stride)` in bytes, exactly (Python integers do not overflow)."""
    if len(indices) != len(strides):
        raise PlanError(f"{len(indices)} indices for {len(strides)} strides")
    return base + sum(i * s for i, s in zip(indices, strides, strict=True))
