"""The element types a plane can hold, as data. Knows no framework; `torch_name` is the attribute of `torch`."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import PlanError


@dataclass(frozen=True, slots=True)
class DType:
    """One stored element (container).

    Attributes:
        name: The name used in plans and messages.
        itemsize: Bytes of one container.
        codes: Values held by one container (2 for the packed 4-bit formats).
        torch_name: Attribute of `torch` with the same bytes; the containers of formats torch cannot
            index are `uint8`.
    """

    name: str
    itemsize: int
    codes: int
    torch_name: str


_TABLE = (
    DType("fp32", 4, 1, "float32"),
    DType("fp16", 2, 1, "float16"),
    DType("bf16", 2, 1, "bfloat16"),
    DType("int8", 1, 1, "int8"),
    DType("e4m3", 1, 1, "uint8"),
    DType("e5m2", 1, 1, "uint8"),
    DType("ue8m0", 1, 1, "uint8"),
    DType("e2m1x2", 1, 2, "uint8"),
)

DTYPES: dict[str, DType] = {d.name: d for d in _TABLE}

#: How configurations and users spell the plain types.
_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}


def dtype(name: str) -> DType:
    """Return the element type called `name` (`bf16`, `bfloat16`, `torch.bfloat16`, ...).

    Raises:
        PlanError: The name is unknown.
    """
    key = name.removeprefix("torch.")
    key = _ALIASES.get(key, key)
    try:
        return DTYPES[key]
    except KeyError:
        raise PlanError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}") from None
