"""From parts and options to kernel arguments: tile sizes, element types, pointers and strides. Launches nothing.

Everything here depends on the plan, not on a step, and is worked out once a part or a call's kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from kvpool.backends.base import Attention
from kvpool.backends.triton.target import Target
from kvpool.dtypes import dtype
from kvpool.errors import UnsupportedError
from kvpool.pools import Part, Plane

#: Plain element types by torch's.
TYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


#: Widest piece of a vector that goes through the tensor cores at once: more would need more registers than there are.
#: Without tensor cores a thread holds rows and columns of a piece, and a latent's beside all sums.
PIECE, EXACT_LATENT_PIECE = 128, 32


def power(n: int, least: int = 1) -> int:
    """Return the least power of two that is not below `n` and `least`."""
    return max(1 << (n - 1).bit_length(), least)


def strides(plane: Plane | None, prefix: str) -> dict[str, int]:
    """Return a plane's strides (b, h, n) in containers, as kernel constants.

    A missing plane has zeros, and so has the only head, whose stride multiplies nothing: both layouts of a latent are
    one kernel.
    """
    if plane is None:
        return {f"{prefix}_{axis}": 0 for axis in "BHN"}
    sizes = zip("BHN", plane.tensor.shape, plane.tensor.stride(), strict=False)
    return {f"{prefix}_{axis}": 0 if axis == "H" and size == 1 else stride for axis, size, stride in sizes}


@dataclass(frozen=True, slots=True, eq=False)
class PartArguments:
    """What kernels need of one part.

    Attributes:
        data: Plane of containers.
        block_scale: Plane of block scales, or `data` when there is none.
        scale: Plane of fp32 scales, or `data`.
        constant: The constant scale; 1 without one.
        exact: Plain types in which a value times its block scale is exact.
        num_scales: Scales of a vector in memory.
        codec: `VALUE`, `BLOCK_VALUE`, `PACKED`, `BLOCK`.
        strides: Of the three planes.
        encode: What the write kernel needs besides.
        decode: What the read kernel needs besides.
        losses: `[3]` int64 on the device: `Counts` of the constant scale.
    """

    data: torch.Tensor
    block_scale: torch.Tensor
    scale: torch.Tensor
    constant: float
    exact: tuple[torch.dtype, ...]
    num_scales: int
    segments: tuple[int, ...]
    codec: dict[str, Any]
    strides: dict[str, int]
    encode: dict[str, Any]
    decode: dict[str, Any]
    losses: torch.Tensor

    def prefixed(self, prefix: str) -> dict[str, Any]:
        """Return codec and strides with the names of one of several parts of a kernel."""
        return {f"{prefix}_{name}": value for name, value in (self.codec | self.strides).items()}


def part_arguments(part: Part, constant: float) -> PartArguments:
    """Work out the arguments of a part.

    Args:
        part: The part.
        constant: Its constant scale; 1 without one.

    Raises:
        UnsupportedError: Its codec has no Triton maths.
    """
    maths = part.codec.triton()
    planes = part.planes
    data, block_scale, scale = planes["data"], planes.get("block_scale"), planes.get("scale")
    bounds = [0]
    for length in part.vector.segments:
        bounds.append(bounds[-1] + length)
    num_scales = 0 if scale is None else scale.tensor.shape[3] if scale.tensor.dim() == 4 else 1
    width = power(part.vector.dim, 16)
    shape = {"D": part.vector.dim, "WIDTH": width, "BOUNDS": tuple(bounds), "BLOCK": maths.block}
    shape |= {"TOKENS_PER_BLOCK": part.tokens_per_block, "NUM_HEADS": part.num_heads, "VECTOR_SCALE": num_scales > 0}
    plane_strides = strides(data, "DATA") | strides(block_scale, "BLOCK") | strides(scale, "SCALE")
    codec = {
        "VALUE": maths.value,
        "BLOCK_VALUE": maths.block_value or maths.value,
        "PACKED": maths.packed,
        "BLOCK": maths.block,
    }
    return PartArguments(
        data.tensor,
        data.tensor if block_scale is None else block_scale.tensor,
        data.tensor if scale is None else scale.tensor,
        constant,
        tuple(getattr(torch, dtype(name).torch_name) for name in maths.exact),
        num_scales,
        part.vector.segments,
        codec,
        plane_strides,
        shape
        | plane_strides
        | {"STORE": maths.store, "CODE": maths.code, "LARGEST": maths.largest, "HAS_NAN": maths.has_nan},
        shape | plane_strides | codec | {"CONSTANT": part.codec.constant_scale},
        torch.zeros(3, dtype=torch.int64, device=data.tensor.device),
    )


#: Elements a program of the write kernel encodes and one of the read kernel decodes.
WRITE_ELEMENTS, READ_ELEMENTS = 2048, 4096


def rows_of(width: int, elements: int) -> int:
    """Return how many vectors of `width` elements a program of so many elements takes."""
    return max(elements // width, 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile sizes of an attention kernel.

    Attributes:
        block_m: Rows (token, head) of a tile.
        block_n: Tokens of one turn of the loop.
        tile_heads: Query heads of a tile.
        tile_tokens: Tokens of a tile.
        num_warps: Warps of a program.
        num_stages: Turns whose loads are in flight.
        max_registers: Registers a thread may have; None leaves it to the assembler, which gives up some of them, and
            spills, where that lets one more program onto a multiprocessor.
    """

    block_m: int
    block_n: int
    tile_heads: int
    tile_tokens: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttendArguments:
    """A kernel of attention for one kind of call on one layer.

    Attributes:
        tensors: The planes of K, its second piece and V.
        logit_factor: K's constant scale.
        r_factor: Constant scale of the second piece over the first's.
        v_constant: Constant scale of V.
        constants: Constant parameters that depend on neither options nor tile sizes.
        key_width: Elements of a key, padded.
        v_width: Elements of a value, padded.
    """

    tensors: tuple[torch.Tensor, ...]
    logit_factor: float
    r_factor: float
    v_constant: float
    constants: dict[str, Any]
    key_width: int
    v_width: int
    group: int
    num_heads: int
    table_group: int

    @property
    def products(self) -> str:
        """How products are made: `exact`, without tensor cores; `tf32`, operands of 32 bits; or `short`."""
        if self.constants["DTYPE"] != tl.float32:
            return "short"
        return "exact" if self.constants["PRECISION"] == "ieee" else "tf32"

    @property
    def narrow(self) -> bool:
        """Whether keys are stored in bytes and widened in registers."""
        return self.tensors[0].element_size() == 1


def choose_shape(
    call: AttendArguments, target: Target, max_rows: int, sparse: bool, tree: bool, bounded: bool
) -> Shape:
    """Choose tile sizes; the compile tests hold them to no spilled register.

    Args:
        call: The kernel.
        target: The device.
        max_rows: Most rows any sequence of the step has.
        sparse: Rows have slots of their own, so that a tile is one token.
        tree: Rows have masks, words of which are read for every row and token: drafts are few.
        bounded: Rows see a window or a chunk, and so each has a bound of its own.
    """
    exactly, double, narrow = call.products == "exact", call.products == "tf32", call.narrow
    wide = max(call.key_width, call.v_width) > 256
    most = 16 if exactly or (wide and narrow and (tree or bounded)) else 32 if wide or tree else target.tile_rows
    block_m = min(power(call.group if sparse else call.group * max_rows, 16), most)
    tile_heads = min(call.group, block_m)
    tile_tokens = 1 if sparse else block_m // tile_heads
    if exactly:
        return Shape(block_m, 16, tile_heads, tile_tokens, 8, 2)
    if wide:
        # Short turns leave what is widened registers, and so do loads of a third, but for slots beside many rows.
        block_n = 32 if narrow or (double and sparse) else 64
        deep = narrow and not (sparse and block_m > 16)
        return Shape(block_m, block_n, tile_heads, tile_tokens, 8, 3 if deep else 2)
    long, many = call.key_width > 128, block_m == target.tile_rows
    # What is widened leaves few registers beside long keys, and beside many rows whose sums pass through registers.
    short_turns = narrow and (long or (many and target.tensor_memory))
    block_n = 32 if double or short_turns or (long and many) else 64
    # Loads of a third turn take registers that long keys, slots and many rows of widened codes leave none.
    full = not short_turns and (long or sparse or (narrow and block_m > 32))
    num_warps, num_stages = 8 if many else 4, 2 if full else 3
    return Shape(block_m, block_n, tile_heads, tile_tokens, num_warps, num_stages, 255 if narrow and many else None)


def _split(dim: int) -> tuple[int, int]:
    """Cut a head into a power of two and the rest, when padding would waste more than that."""
    first = power(dim)
    if first == dim or dim < 48:
        return dim, 0
    return first // 2, dim - first // 2


def product_type(q: torch.dtype, *parts: PartArguments) -> tuple[torch.dtype, str]:
    """Return the type products are made in, and how exactly.

    It is the query's type where all stored values are exact in it; else fp32, on tensor cores (which then keep 11
    bits) where neither the query nor the stored values have more, as fp16 keys have not for a bf16 query.
    """
    if all(q in part.exact for part in parts):
        return q, "ieee"
    short = q != torch.float32 and all(part.exact[0] != torch.float32 for part in parts)
    return torch.float32, "tf32" if short else "ieee"


def attend_arguments(
    k: tuple[Part, ...], v: Part, v_dim: int, q_dtype: torch.dtype, num_q_heads: int, arguments: Any, target: Target
) -> AttendArguments:
    """Work out the arguments of an attention call.

    Args:
        k: Parts of a key.
        v: Part of the values; one of `k` for latents.
        v_dim: Elements of a value.
        q_dtype: Of the query.
        num_q_heads: Q.
        arguments: `Part -> PartArguments`.
        target: The device.
    """
    first, values = arguments(k[0]), arguments(v)
    shared = v is k[0]
    if len(k) == 2:
        rest, cut, r_first, r_count, r_scale = arguments(k[1]), k[0].vector.dim, 0, k[1].vector.dim, 0
    elif shared:
        dim = k[0].vector.dim
        rest, cut, r_first, r_count = first, v_dim, v_dim, dim - v_dim
        r_scale = first.num_scales - 1 if r_count else 0
    else:
        cut, r_count = _split(k[0].vector.dim)
        rest, r_first, r_scale = first, cut, 0
    for part, single in ((v, not shared), (k[-1], len(k) == 2)):
        if single and arguments(part).num_scales > 1:
            raise UnsupportedError(
                f"{part.name!r} with {arguments(part).num_scales} scales a vector has no Triton attention kernel; split"
                " it into parts of their own, or use backend='reference'"
            )
    dot, precision = product_type(q_dtype, first, rest, values)
    exactly = dot == torch.float32 and precision == "ieee"
    widest = EXACT_LATENT_PIECE if shared and exactly and not target.interpreted else PIECE
    width, num_scales, scaled = _pieces_of(first, cut, widest)
    if target.interpreted:
        dot, precision = torch.float32, "ieee"
    # P times a scale must not leave the range of fp16.
    v_dot = torch.bfloat16 if dot == torch.float16 and values.num_scales else dot
    v_width = width if shared else min(power(v_dim, 16), widest)
    constants = first.prefixed("K") | rest.prefixed("R") | values.prefixed("V")
    constants |= {
        "NUM_HEADS": v.num_heads,
        "GROUP": num_q_heads // v.num_heads,
        "TOKENS_PER_BLOCK": v.tokens_per_block,
        "K_COUNT": cut,
        "K_WIDTH": width,
        "K_PIECES": -(-cut // width),
        "R_FIRST": r_first,
        "R_COUNT": r_count,
        "R_WIDTH": power(r_count, 16) if r_count else 16,
        "V_COUNT": v_dim,
        "V_WIDTH": v_width,
        "V_PIECES": -(-v_dim // v_width),
        "V_TOTAL": power(v_dim, 16),
        "SHARED_V": shared,
        "DTYPE": TYPES[dot],
        "V_DTYPE": TYPES[v_dot],
        "PRECISION": precision,
        "CAST": target.cast,
        "HARDWARE": target.hardware,
        "K_SCALES": num_scales,
        "K_SCALED": scaled,
        "R_SCALES": min(rest.num_scales, 1),
        "R_SCALE_FIRST": r_scale,
        "V_SCALES": 0 if shared else values.num_scales,
    }
    planes = [t for a in (first, rest, values) for t in (a.data, a.block_scale, a.scale)]
    key_width = power(cut) + (constants["R_WIDTH"] if r_count else 0)
    return AttendArguments(
        tuple(planes),
        first.constant,
        rest.constant / first.constant,
        values.constant,
        constants,
        key_width,
        constants["V_TOTAL"],
        num_q_heads // v.num_heads,
        v.num_heads,
        v.group,
    )


def _pieces_of(part: PartArguments, count: int, widest: int) -> tuple[int, int, int]:
    """Return (width of a piece, scales in memory, pieces a scale) of the first `count` elements of a part's vectors.

    One scale may serve any pieces; several serve equally many each.
    """
    if part.num_scales <= 1:
        return min(power(count, 16), widest), part.num_scales, 1
    lengths = part.segments
    covered = next(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= count)
    if covered == 1:
        return min(power(count, 16), widest), 1, 1
    width = lengths[0]
    if width != power(width, 16) or any(n != width for n in lengths[: covered - 1]):
        raise UnsupportedError(f"segments {lengths} of a latent have no Triton kernel; use backend='reference'")
    pieces = max(width // widest, 1)
    return width // pieces, covered, pieces


def score_arguments(part: PartArguments, q_dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """Return the constant parameters of the score kernel for indexer keys."""
    dim = sum(part.segments)
    width, num_scales, _ = _pieces_of(part, dim, PIECE)
    dot, precision = product_type(q_dtype, part)
    if target.interpreted:
        dot, precision = torch.float32, "ieee"
    return part.prefixed("K") | {
        "K_COUNT": dim,
        "K_WIDTH": width,
        "K_PIECES": -(-dim // width),
        "K_SCALES": num_scales,
        "DTYPE": TYPES[dot],
        "PRECISION": precision,
        "HARDWARE": target.hardware,
        "BLOCK_N": 64,
    }


def option_constants(options: Attention, has_lse: bool) -> dict[str, Any]:
    """Return the constant parameters of what is asked."""
    lifetime = options.lifetime
    return {
        "WINDOW": lifetime.window or 0,
        "CHUNK": lifetime.chunk or 0,
        "SINK_TOKENS": lifetime.sink_tokens,
        "SOFTCAP": options.softcap > 0,
        "HAS_SINKS": options.sinks is not None,
        "HAS_LSE": has_lse,
        "SPARSE": options.indices is not None,
        "TREE": options.tree is not None,
    }
