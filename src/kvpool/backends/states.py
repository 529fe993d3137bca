"""Recurrent states by the codecs' own torch maths: what states hold on every backend without kernels for them."""

from __future__ import annotations

import torch

from kvpool.pools import Part


def read_states(part: Part, slots: torch.Tensor) -> torch.Tensor:
    """Decode the states in `slots [S]` int32 to fp32 `[S, D]`; zeros for -1."""
    held = slots >= 0
    if bool(held.all()):
        planes = {name: plane.tensor[slots.long(), 0, 0] for name, plane in part.planes.items()}
        return part.codec.decode(planes, part.vector, part.constants.scale)
    out = torch.zeros((len(slots), part.vector.dim), device=slots.device)
    out[held] = read_states(part, slots[held])
    return out


def write_states(part: Part, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Encode `states [S, D]` into `slots [S]` int32; -1 writes nothing."""
    part.constants.freeze()
    keep = slots >= 0
    encoded = part.codec.encode(states[keep], part.vector, part.constants.scale, part.constants.counts)
    for name, values in encoded.items():
        part.planes[name].tensor[slots[keep].long(), 0, 0] = values
