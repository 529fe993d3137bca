"""What a codec is: how one vector becomes bytes, as planes (data) and as torch maths (imported on use)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One plane a codec keeps for every vector (one token, one head, K or V).

    Attributes:
        name: `data`, `scale` or `block_scale`.
        dtype: Container type (a name of `kvpool.dtypes`).
        containers: Extent of the last axis `C`; 0 for one container a vector without an axis of its own.
    """

    name: str
    dtype: str
    containers: int


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector a codec stores: its length, and the parts of it that have a scale of their own.

    Attributes:
        segments: Lengths of the parts, in order: `(D,)` for a head, 128s then the rope part for a latent,
            `quant_block`s for indexer keys, one row each for a state.
    """

    segments: tuple[int, ...]

    @property
    def dim(self) -> int:
        """Number of elements."""
        return sum(self.segments)


@dataclass(slots=True)
class Counts:
    """What a constant scale did to the elements it was asked to store; grows with every encode.

    Attributes:
        saturated: Finite elements beyond the largest code, stored as that code. In a format with block scales,
            only those of a block whose own scale saturated.
        flushed: Finite elements other than zero stored as zero. In a format with block scales, only those of a
            block stored as zero altogether.
        nonfinite: NaN and infinities stored as zero by a format that has no code for them.
    """

    saturated: int = 0
    flushed: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class TritonMaths:
    """What a Triton kernel needs to know of a format, as data and device functions.

    An element is `value(code)`, times its block scale, times the scale of its segment, vector or layer.

    Attributes:
        value: Containers to values, in a float type in which they are exact.
        code: fp32 in units of the scale to containers.
        store: How a tile of vectors is scaled, rounded and stored (one of `kvpool.codecs.jit`).
        exact: Plain types in which a value times its block scale is exact, fastest first.
        block_value: The same for the block scales; None without them.
        block: Elements of one block scale; 0 without them.
        packed: Two codes a container.
        largest: Largest code.
        has_nan: The format has a code for NaN.
    """

    value: Any
    code: Any
    store: Any
    exact: tuple[str, ...]
    block_value: Any = None
    block: int = 0
    packed: bool = False
    largest: float = 0.0
    has_nan: bool = True


class Codec(ABC):
    """One stored format.

    A subclass says which planes a vector needs and gives the arithmetic that defines the bytes. All maths
    is fp32 with round-to-nearest-even, no fused multiply-add and no flush to zero, so that every backend
    agrees to the bit.

    Attributes:
        name: The name users write.
        constant_scale: True when a decode scale per layer and plane must be given or calibrated before the
            first write.
        quantised: True when smoothing and rotation can help: elements share a scale.
        largest: Largest decoded magnitude at a constant scale of 1; the calibrated scale is amax over this.
    """

    name: str
    constant_scale: bool = False
    quantised: bool = True
    largest: float = math.inf

    @abstractmethod
    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        """Return the planes of one vector, `data` first.

        Raises:
            PlanError: A vector of this length cannot be stored in this format.
        """

    @abstractmethod
    def encode(
        self, x: torch.Tensor, vector: Vector, scale: float | None = None, counts: Counts | None = None
    ) -> dict[str, torch.Tensor]:
        """Encode vectors.

        A NaN or an infinity makes its own vector (or segment, or block of a block scale) decode to NaN, and no
        other; with a constant scale and no block scales, its own element.

        Args:
            x: `[..., D]`, any float dtype; taken as fp32.
            vector: Lengths and segments of the last axis.
            scale: The constant decode scale of this layer and plane, for codecs with `constant_scale`.
            counts: Added to by codecs with `constant_scale`; others never lose an element this way.

        Returns:
            One tensor a plane: `[..., C]`, or `[...]` for planes without `C`, in the container's torch dtype.

        Raises:
            PlanError: `constant_scale` is true and no scale is given.
        """

    @abstractmethod
    def decode(self, planes: Mapping[str, torch.Tensor], vector: Vector, scale: float | None = None) -> torch.Tensor:
        """Decode what `encode` returned, to fp32 `[..., D]`."""

    def triton(self) -> TritonMaths:
        """Return the device maths of the Triton backend.

        Raises:
            UnsupportedError: The codec has none; it runs on the reference backend.
        """
        raise UnsupportedError(f"codec {self.name!r} has no Triton maths; use backend='reference' for it")

    def bits_per_element(self, vector: Vector) -> float:
        """Stored bits for one element of `vector`, scales included."""
        from kvpool.dtypes import dtype

        total = sum(max(p.containers, 1) * dtype(p.dtype).itemsize for p in self.planes(vector))
        return 8 * total / vector.dim


def need_scale(codec: str, scale: float | None) -> float:
    """Return `scale`, or raise `PlanError` when a codec with a constant scale has none."""
    if scale is None:
        raise PlanError(
            f"codec {codec!r} stores codes of a constant decode scale and none is set; give it with set_constants,"
            " measure it with calibrate, or ask for 1.0 with scales='unit'"
        )
    return scale


def need_multiple(codec: str, vector: Vector, multiple: int, why: str) -> None:
    """Raise `PlanError` unless every segment of `vector` is a multiple of `multiple`."""
    for segment in vector.segments:
        if segment % multiple:
            raise PlanError(
                f"codec {codec!r} cannot store vectors of {vector.dim} elements: {why}, so {segment} must be a"
                f" multiple of {multiple}; use fp8 or int8, or give this part a codec of its own"
            )
