"""The only door to kernels: every tensor is checked here once, against the plan, before a backend sees it."""

from __future__ import annotations

import torch

from kvpool.backends import Attention, Backend
from kvpool.errors import LayoutError
from kvpool.kinds import Lifetime
from kvpool.pools import Part
from kvpool.step import Step

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(name: str, x: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise `LayoutError` unless `x` is a float tensor of this shape whose last axis is contiguous.

    Args:
        name: What the caller calls it.
        shape: Expected extents.
        meaning: Their axes, for the message.
    """
    if x.shape != shape:
        raise LayoutError(f"{name} must be {meaning} = {list(shape)}, got {list(x.shape)}")
    if x.dtype not in _FLOATS:
        raise LayoutError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}; convert it first")
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise LayoutError(f"{name} must be contiguous on its last axis, got strides {x.stride()}; call .contiguous()")


def write(backend: Backend, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step) -> None:
    """Store one tensor a part at the step's slots.

    Args:
        parts: Parts of one layer.
        tensors: `[T, H, D]` for each part; any strides on T and H.
        step: An open step.

    Raises:
        LayoutError: A tensor does not fit its part.
    """
    if not step.open:
        raise LayoutError("write needs an open step; this one has ended")
    for part, x in zip(parts, tensors, strict=True):
        check(part.name, x, (step.total_tokens, part.num_heads, part.vector.dim), "[T, H, D]")
    backend.write(parts, tensors, step)


def attend(
    backend: Backend,
    q: torch.Tensor,
    k: tuple[Part, ...],
    v: Part,
    v_dim: int,
    step: Step,
    options: Attention,
    out: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with the step's rows to what their sequences hold.

    Args:
        q: `[T, Q, D]`; Q a multiple of the KV heads.
        k: Parts that make up a key, one after another.
        v: Part that holds the values, read up to `v_dim`.
        out: `[T, Q, v_dim]` to fill, or None.

    Returns:
        (out, lse `[T, Q]` fp32 natural log or None).

    Raises:
        LayoutError: A tensor does not fit.
    """
    if not step.open:
        raise LayoutError("attend needs an open step; this one has ended")
    if q.dim() != 3 or q.shape[1] % v.num_heads:
        raise LayoutError(f"q must be [T, Q, D] with Q a multiple of {v.num_heads} KV heads, got {list(q.shape)}")
    t, num_q, dim = step.total_tokens, q.shape[1], k[0].vector.dim if len(k) == 1 else sum(p.vector.dim for p in k)
    check("q", q, (t, num_q, dim), "[T, Q, D]")
    if out is None:
        out = torch.empty((t, num_q, v_dim), dtype=q.dtype, device=q.device)
    else:
        check("out", out, (t, num_q, v_dim), "[T, Q, Dv]")
    if options.sinks is not None and options.sinks.shape != (num_q,):
        raise LayoutError(f"sinks must be [Q] = [{num_q}], got {list(options.sinks.shape)}")
    if options.indices is not None and (options.indices.dtype != torch.int64 or options.indices.shape[0] != t):
        raise LayoutError(
            f"indices must be [T, K] int64 with T = {t}, got {list(options.indices.shape)} {options.indices.dtype}"
        )
    lse = torch.empty((t, num_q), dtype=torch.float32, device=q.device) if return_lse else None
    backend.attend(q, k, v, v_dim, step, options, out, lse)
    return out, lse


def state_read(part: Part, shape: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
    """Decode the states in `slots`.

    Args:
        part: A state of one layer.
        shape: Its logical shape.
        slots: `[S]` int32; -1 for a sequence that has none yet.

    Returns:
        `[S, *shape]`, fp32 or the plain format it is stored in; zeros where there was none.
    """
    held = slots >= 0
    if bool(held.all()):
        planes = {name: plane.tensor[slots.long(), 0, 0] for name, plane in part.planes.items()}
        return part.codec.decode(planes, part.vector, part.constants.scale).view(-1, *shape)
    out = torch.zeros((len(slots), *shape), device=slots.device)
    out[held] = state_read(part, shape, slots[held])
    return out


def state_write(part: Part, shape: tuple[int, ...], slots: torch.Tensor, states: torch.Tensor) -> None:
    """Encode `states [S, *shape]` into `slots [S]` int32.

    Raises:
        LayoutError: The tensor does not fit.
    """
    if states.shape != (len(slots), *shape):
        raise LayoutError(f"{part.name} must be [S, *shape] = {[len(slots), *shape]}, got {list(states.shape)}")
    part.constants.freeze()
    flat = states.reshape(len(slots), part.vector.dim)
    encoded = part.codec.encode(flat, part.vector, part.constants.scale, part.constants.counts)
    for name, values in encoded.items():
        part.planes[name].tensor[slots.long(), 0, 0] = values


def score(
    backend: Backend, q: torch.Tensor, weights: torch.Tensor, part: Part, step: Step, lifetime: Lifetime, topk: int
) -> torch.Tensor:
    """Pick the tokens that matter most to every row, for `attend`'s `indices`.

    Args:
        q: `[T, Hi, Di]` indexer queries.
        weights: `[T, Hi]`, any float type; factor of each head.
        part: The indexer keys.
        topk: Tokens wanted.

    Returns:
        `[T, topk]` int64 slots, best first; -1 where a row sees fewer.

    Raises:
        LayoutError: A tensor does not fit.
    """
    if not step.open:
        raise LayoutError("score needs an open step; this one has ended")
    if q.dim() != 3 or topk < 1:
        raise LayoutError(f"score needs q [T, Hi, Di] and a positive topk, got {list(q.shape)} and {topk}")
    check("q", q, (step.total_tokens, q.shape[1], part.vector.dim), "[T, Hi, Di]")
    check("weights", weights, (step.total_tokens, q.shape[1]), "[T, Hi]")
    indices = torch.empty((step.total_tokens, topk), dtype=torch.int64, device=q.device)
    backend.score(q, weights, part, step, lifetime, indices)
    return indices
