"""Recurrent states as rows that the kernels of vectors store and read. Launches nothing.

To a kernel a state is a token with one head a row. A row has a scale of its own where the codec keeps one; where none
is kept in memory, rows are cut as it suits the kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvpool.backends.triton.launch import PartArguments, power
from kvpool.errors import UnsupportedError
from kvpool.pools import Part

#: Elements of a row that is cut freely.
ROW_ELEMENTS = 1024


def state_rows(part: Part) -> tuple[int, int]:
    """Return (rows, elements of a row) of a state.

    Raises:
        UnsupportedError: One scale serves all its rows.
    """
    scale = part.planes.get("scale")
    segments = part.vector.segments
    if scale is None:
        elements = math.gcd(part.vector.dim, ROW_ELEMENTS)
        return part.vector.dim // elements, elements
    if scale.tensor.shape[3:].numel() != len(segments):
        raise UnsupportedError(
            f"{part.codec.name} keeps one scale for the {len(segments)} rows of state {part.name!r}, which no Triton"
            " kernel stores; use a codec with a scale a row, or backend='reference'"
        )
    return len(segments), segments[0]


def state_arguments(part: Part, found: PartArguments) -> PartArguments:
    """Return the arguments of a part as those of its rows."""
    rows, elements = state_rows(part)
    changes: dict[str, object] = {
        "D": elements,
        "WIDTH": power(elements, 16),
        "BOUNDS": (0, elements),
        "NUM_HEADS": rows,
        "TOKENS_PER_BLOCK": 1,
    }
    for name, prefix in (("data", "DATA"), ("block_scale", "BLOCK"), ("scale", "SCALE")):
        if name in part.planes:
            changes[f"{prefix}_H"] = part.planes[name].tensor.shape[3:].numel() // rows
    return replace(found, encode=found.encode | changes, decode=found.decode | changes)
