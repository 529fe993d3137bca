"""The only door to kernels: every tensor is checked here once, against the plan, before a backend sees it."""

from __future__ import annotations

import math

import torch

from kvpool.backends import Attention, Backend
from kvpool.errors import LayoutError
from kvpool.kinds import Lifetime
from kvpool.pools import Part
from kvpool.step import Step

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(name: str, x: torch.Tensor, shape: tuple[int, ...], meaning: str, device: torch.device) -> None:
    """Raise `LayoutError` unless `x` is a strided float tensor of this shape, its last axis contiguous, on the device.

    Args:
        name: What the caller calls it.
        shape: Expected extents.
        meaning: Their axes, for the message.
        device: Where kernels read it.
    """
    try:
        if x.shape == shape and x.device == device and x.dtype in _FLOATS and (x.stride(-1) == 1 or x.shape[-1] == 1):
            return
    except (AttributeError, RuntimeError):  # not a tensor, or one without strides
        pass
    on_device(name, x, device)
    if x.shape != shape:
        raise LayoutError(f"{name} must be {meaning} = {list(shape)}, got {list(x.shape)}")
    if x.dtype not in _FLOATS:
        raise LayoutError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}; convert it first")
    raise LayoutError(f"{name} must be contiguous on its last axis, got strides {x.stride()}; call .contiguous()")


def on_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    """Raise `LayoutError` unless `x` is a strided tensor on this device: kernels follow its address."""
    if not isinstance(x, torch.Tensor):
        raise LayoutError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.device != device or x.layout is not torch.strided:
        raise LayoutError(f"{name} must be a strided tensor on {device}, got {x.layout} on {x.device}; move it first")


def check_slots(name: str, slots: torch.Tensor, dims: int, device: torch.device) -> None:
    """Raise `LayoutError` unless `slots` is a contiguous int64 tensor of so many axes on the device."""
    on_device(name, slots, device)
    if slots.dtype != torch.int64 or slots.dim() != dims or not slots.is_contiguous():
        raise LayoutError(
            f"{name} must be contiguous int64 of {dims} axes, got {slots.dtype} {list(slots.shape)} with strides"
            f" {slots.stride()}"
        )


def open_step(step: Step, what: str) -> None:
    """Raise `LayoutError` unless a step is open and started."""
    if not step.open:
        raise LayoutError(f"{what} needs an open step; this one has ended")
    if not step.started:
        raise LayoutError(f"{what} needs a started step; call its start() once the step before has run")


def write(backend: Backend, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step) -> None:
    """Store one tensor a part at the step's slots.

    Args:
        parts: Parts of one layer.
        tensors: `[T, H, D]` for each part; any strides on T and H.
        step: An open step.

    Raises:
        LayoutError: A tensor does not fit its part.
    """
    open_step(step, "write")
    for part, x in zip(parts, tensors, strict=True):
        check(part.name, x, (step.total_tokens, part.num_heads, part.vector.dim), "[T, H, D]", step.device)
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
    open_step(step, "attend")
    if not isinstance(q, torch.Tensor):
        raise LayoutError(f"q must be a tensor, got {type(q).__name__}")
    shape = q.shape  # each access makes a tuple
    if len(shape) != 3 or shape[1] % v.num_heads:
        raise LayoutError(f"q must be [T, Q, D] with Q a multiple of {v.num_heads} KV heads, got {list(shape)}")
    t, num_q, dim = step.total_tokens, shape[1], k[0].vector.dim if len(k) == 1 else sum(p.vector.dim for p in k)
    check("q", q, (t, num_q, dim), "[T, Q, D]", step.device)
    if out is None:
        out = q.new_empty((t, num_q, v_dim))
    else:
        check("out", out, (t, num_q, v_dim), "[T, Q, Dv]", step.device)
        per_row, per_head, _ = out.stride()
        if (t > 1 and not per_row) or (num_q > 1 and not per_head):
            raise LayoutError(f"out must have a place for every row and head, got strides {out.stride()}; allocate it")
    if not math.isfinite(options.scale) or not 0 <= options.softcap < math.inf:
        raise LayoutError(f"scale must be finite and softcap positive, got {options.scale} and {options.softcap}")
    if options.sinks is not None:
        on_device("sinks", options.sinks, step.device)
        if options.sinks.shape != (num_q,):
            raise LayoutError(f"sinks must be [Q] = [{num_q}], got {list(options.sinks.shape)}")
    if options.indices is not None:
        check_slots("indices", options.indices, 2, step.device)
        if options.indices.shape[0] != t:
            raise LayoutError(f"indices must be [T, K] with T = {t}, got {list(options.indices.shape)}")
    lse = q.new_empty((t, num_q), dtype=torch.float32) if return_lse else None
    backend.attend(q, k, v, v_dim, step, options, out, lse)
    return out, lse


def read(backend: Backend, part: Part, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode the tokens at `slots [n]` int64 of a part: `[n, H, D]` of a float type; zeros for -1.

    Raises:
        LayoutError: The slots are no list of slots, or the type is none that kernels write.
    """
    check_slots("slots", slots, 1, part.planes["data"].tensor.device)
    if dtype not in _FLOATS:
        raise LayoutError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    out = torch.empty((len(slots), part.num_heads, part.vector.dim), dtype=dtype, device=slots.device)
    backend.read(part, slots, out)
    return out


def convert(backend: Backend, source: Part, source_slots: torch.Tensor, part: Part, slots: torch.Tensor) -> None:
    """Store what one part holds at `source_slots [n]` at `slots [n]` of another, of any codec and layout.

    Raises:
        LayoutError: The parts hold other vectors, or the slots are no lists of equal length.
    """
    if (source.num_heads, source.vector.dim) != (part.num_heads, part.vector.dim):
        raise LayoutError(
            f"{source.name} has {source.num_heads} heads of {source.vector.dim}, {part.name} has {part.num_heads} of"
            f" {part.vector.dim}; convert between parts of one model"
        )
    device = part.planes["data"].tensor.device
    check_slots("source_slots", source_slots, 1, device)
    check_slots("slots", slots, 1, device)
    if len(slots) != len(source_slots):
        raise LayoutError(f"source_slots and slots must be alike, got {len(source_slots)} and {len(slots)}")
    backend.convert(source, source_slots, part, slots)


def state_read(backend: Backend, part: Part, shape: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
    """Decode the states in `slots`.

    Args:
        part: A state of one layer.
        shape: Its logical shape.
        slots: `[S]` int32; -1 for a sequence that has none yet.

    Returns:
        `[S, *shape]` fp32; zeros where there was none.
    """
    return backend.read_states(part, slots).view(-1, *shape)


def state_write(
    backend: Backend, part: Part, shape: tuple[int, ...], slots: torch.Tensor, states: torch.Tensor
) -> None:
    """Encode `states [S, *shape]` into `slots [S]` int32; -1 writes nothing.

    Raises:
        LayoutError: The tensor does not fit.
    """
    on_device(part.name, states, slots.device)
    if states.shape != (len(slots), *shape) or states.dtype not in _FLOATS:
        raise LayoutError(
            f"{part.name} must be [S, *shape] = {[len(slots), *shape]} of a float type, got {list(states.shape)} of"
            f" {states.dtype}"
        )
    backend.write_states(part, slots, states.reshape(len(slots), part.vector.dim))


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
    open_step(step, "score")
    if q.dim() != 3 or topk < 1:
        raise LayoutError(f"score needs q [T, Hi, Di] and a positive topk, got {list(q.shape)} and {topk}")
    check("q", q, (step.total_tokens, q.shape[1], part.vector.dim), "[T, Hi, Di]", step.device)
    check("weights", weights, (step.total_tokens, q.shape[1]), "[T, Hi]", step.device)
    indices = torch.empty((step.total_tokens, topk), dtype=torch.int64, device=q.device)
    backend.score(q, weights, part, step, lifetime, indices)
    return indices
