"""Where bytes lie: groups, pools and planes with their offsets and strides. Knows kinds, codecs and layouts, no budget.

A block of a group is one record; every plane is an offset inside it plus strides, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvpool.codecs import Codec, PlaneSpec, Vector, get_codec
from kvpool.dtypes import dtype
from kvpool.errors import PlanError
from kvpool.kinds import FULL, IndexerKind, Kind, KVKind, LatentKind, Lifetime, StateKind
from kvpool.layout import Layout, inner_strides
from kvpool.spec import CacheSpec

#: Every plane of a layer starts at a multiple of this inside a block (one cache line pair; TMA needs 128).
PLANE_ALIGNMENT = 128
#: A block is a multiple of this.
BLOCK_ALIGNMENT = 256
#: Latents keep one scale for each so many channels (DeepSeek's FP8 block size).
LATENT_SCALE_CHANNELS = 128


def align(value: int, to: int) -> int:
    """Round `value` up to a multiple of `to`."""
    return -(-value // to) * to


def ceil_div(value: int, by: int) -> int:
    """Divide and round up."""
    return -(-value // by)


@dataclass(frozen=True, slots=True)
class PlanePlan:
    """One tensor of a pool.

    Attributes:
        name: `data`, `scale` or `block_scale`.
        dtype: Container type.
        order: Axes in memory, outermost first.
        shape: Extents in the logical order `B L F H N C` (`C` missing for one value a vector); B is reserved.
        strides: Bytes, in the same order as `shape`.
        offset: Bytes from the start of the slab to element zero.
        bytes_per_block: Bytes of one block over all layers, without alignment.
    """

    name: str
    dtype: str
    order: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The planes of one kind and codec, for all its layers of a group.

    Attributes:
        parts: What each index of the F axis holds: `("k", "v")`, `("k",)`, `("latent",)`, `("index",)`, ...
        kind: What the layers store on this tensor-parallel rank.
        layers: Model layers, ascending; position in this tuple is the index on the L axis.
        vector: Length and segments of one vector.
    """

    parts: tuple[str, ...]
    kind: Kind
    layers: tuple[int, ...]
    num_heads: int
    vector: Vector
    codec: str
    layout: str
    planes: tuple[PlanePlan, ...]

    @property
    def kv_factor(self) -> int:
        """Extent of the F axis."""
        return len(self.parts)

    def plane(self, name: str) -> PlanePlan:
        """Return the plane called `name`."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        raise PlanError(
            f"pool {self.parts} in {self.codec} has no plane {name!r}; it has {[p.name for p in self.planes]}"
        )


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A part of a slab: `num_rows` rows of a block, one pitch apart.

    A block-outermost group has one range of one row (the block); a layer-first group has one row a layer, in one range
    for each set of layers that store the same.

    Attributes:
        offset: Bytes from the start of the slab.
        row_bytes: Bytes of one row of one block; row r of block b starts at `offset + r * pitch_bytes + b * row_bytes`.
        num_rows: Rows of a block in this range.
        pitch_bytes: Bytes from one row's blocks to the next row's.
    """

    offset: int
    row_bytes: int
    num_rows: int
    pitch_bytes: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The layers with one lifetime: one slab, one id space, one block table a sequence.

    Attributes:
        name: `full`, `window-4096`, `chunk-8192`, `state`.
        lifetime: Of the tokens; None for a state group.
        num_blocks: Blocks committed at the start.
        num_blocks_reserved: Blocks the slab has addresses for.
        tokens_per_block: Tokens a block holds; 1 for a state group (a block is one state).
        bytes_per_block: Bytes of a block over all its layers, alignment included.
        payload_bytes_per_block: The same without alignment.
        ranges: Where the bytes of a block lie; see `BlockRange`.
        layer_first: True when the slab is one range a layer, so that a block is `len(layers)` pieces.
        layer_pitch_bytes: Layer-first only: bytes from one layer's blocks to the next's, in the first range.
    """

    name: str
    lifetime: Lifetime | None
    layers: tuple[int, ...]
    num_blocks: int
    num_blocks_reserved: int
    tokens_per_block: int
    bytes_per_block: int
    payload_bytes_per_block: int
    pools: tuple[PoolPlan, ...]
    ranges: tuple[BlockRange, ...]
    layer_first: bool = False
    layer_pitch_bytes: int = 0

    @property
    def is_state(self) -> bool:
        """True for a group of recurrent states."""
        return self.lifetime is None

    @property
    def slab_bytes(self) -> int:
        """Bytes of the reserved address range."""
        if not self.layer_first:
            return self.bytes_per_block * self.num_blocks_reserved
        return max(r.offset + r.pitch_bytes * r.num_rows for r in self.ranges)

    def pieces(self, block: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of every piece of a block in the slab: one, or one a layer when layer-first."""
        return [
            (r.offset + row * r.pitch_bytes + block * r.row_bytes, r.row_bytes)
            for r in self.ranges
            for row in range(r.num_rows)
        ]

    def committed_bytes(self, num_blocks: int, granule_bytes: int) -> int:
        """Return the bytes of memory behind the first `num_blocks` blocks, in whole granules."""
        return sum(r.num_rows * align(r.row_bytes * num_blocks, granule_bytes) for r in self.ranges)

    def blocks_for(self, num_tokens: int, *, max_step_tokens: int = 0, checkpoints: int = 0) -> int:
        """Return the blocks a sequence of `num_tokens` holds (DESIGN section 6).

        Args:
            num_tokens: Length of the sequence.
            max_step_tokens: Tokens of a chunk in flight, during prefill.
            checkpoints: Checkpoints kept, for a state group.
        """
        if self.lifetime is None:
            return 1 + checkpoints
        n = self.tokens_per_block
        whole = ceil_div(num_tokens, n)
        if self.lifetime.window is not None:
            seen = ceil_div(self.lifetime.sink_tokens, n) + ceil_div(self.lifetime.window - 1, n) + 1
            return min(whole, seen + ceil_div(max_step_tokens, n))
        if self.lifetime.chunk is not None:
            c = self.lifetime.chunk
            return min(whole, ceil_div(c, n) + (1 if c % n else 0) + ceil_div(max_step_tokens, n))
        return whole


# --- from kinds to pools ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool before its planes have places."""

    parts: tuple[str, ...]
    kind: Kind
    num_heads: int
    vector: Vector
    codec: Codec


def pools_of(kind: Kind, codecs: Mapping[str, str]) -> list[Pool]:
    """Split what a layer stores into pools: one for each codec and vector size.

    Args:
        kind: What the layer stores on this rank.
        codecs: Codec name of every part.
    """

    def pool(parts: tuple[str, ...], heads: int, segments: tuple[int, ...]) -> Pool:
        return Pool(parts, kind, heads, Vector(segments), get_codec(codecs[parts[0]]))

    if isinstance(kind, KVKind):
        if kind.head_dim == kind.v_head_dim and codecs["k"] == codecs["v"]:
            return [pool(("k", "v"), kind.num_kv_heads, (kind.head_dim,))]
        return [
            pool(("k",), kind.num_kv_heads, (kind.head_dim,)),
            pool(("v",), kind.num_kv_heads, (kind.v_head_dim,)),
        ]
    if isinstance(kind, LatentKind):
        latent = _split(kind.kv_lora_rank, LATENT_SCALE_CHANNELS)
        rope = (kind.qk_rope_head_dim,) if kind.qk_rope_head_dim else ()
        if not rope or codecs["latent"] == codecs["rope"]:
            return [pool(("latent",), 1, latent + rope)]
        return [pool(("latent",), 1, latent), pool(("rope",), 1, rope)]
    if isinstance(kind, IndexerKind):
        return [pool(("index",), 1, _split(kind.index_head_dim, kind.quant_block))]
    if isinstance(kind, StateKind):
        rows = kind.num_elements // kind.shape[-1]
        name = codecs.get(kind.name, kind.dtype)
        return [Pool((kind.name,), kind, 1, Vector((kind.shape[-1],) * rows), get_codec(name))]
    return []


def _split(dim: int, size: int) -> tuple[int, ...]:
    """Cut `dim` into pieces of at most `size`."""
    return (size,) * (dim // size) + ((dim % size,) if dim % size else ())


#: The pools of every lifetime, each with its layers; the key is the group's name and lifetime.
Grouped = dict[tuple[str, Lifetime | None], list[tuple[Pool, tuple[int, ...]]]]


def group_pools(
    spec: CacheSpec, codecs: list[dict[str, str]], layers: Iterable[int], max_seq_len: int, tp_size: int
) -> Grouped:
    """Collect the pools of every lifetime, with the layers that have them, full first and states last.

    A window or chunk not shorter than `max_seq_len` drops nothing: its layers join the full group.
    """
    found: dict[tuple[str, Lifetime | None], dict[tuple[object, ...], tuple[Pool, list[int]]]] = {}
    cut: dict[tuple[Kind, int], list[Pool]] = {}
    for index in layers:
        layer = spec.layers[index]
        for kind in layer.kinds:
            pools = cut.get((kind, id(codecs[index])))
            if pools is None:
                pools = cut[kind, id(codecs[index])] = pools_of(kind.shard(tp_size), codecs[index])
            lifetime = None if isinstance(kind, StateKind) else layer.lifetime
            if lifetime is not None and max_seq_len <= (lifetime.window or lifetime.chunk or max_seq_len):
                lifetime = FULL
            for pool in pools:
                group = found.setdefault((lifetime.name if lifetime else "state", lifetime), {})
                key = (pool.parts, pool.kind, pool.codec.name)
                group.setdefault(key, (pool, []))[1].append(index)
    order = sorted(found, key=lambda k: (k[1] is None, k[1] is not FULL and k[1] != FULL))
    return {name: [(pool, tuple(ls)) for pool, ls in found[name].values()] for name in order}


# --- from pools to places -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plane:
    """A plane inside one layer of one block."""

    spec: PlaneSpec
    order: str
    sizes: dict[str, int]
    strides: dict[str, int]
    offset: int
    num_bytes: int


def _planes(pools: list[Pool], layout: Layout, tokens_per_block: int) -> tuple[list[list[_Plane]], int, int]:
    """Lay the planes of `pools` one after another: the record of one layer.

    Returns:
        (planes of each pool, bytes of the record with alignment, bytes without).
    """
    out: list[list[_Plane]] = []
    inside, payload = 0, 0
    for pool in pools:
        planes = []
        for spec in pool.codec.planes(pool.vector):
            itemsize = dtype(spec.dtype).itemsize
            sizes = {"F": len(pool.parts), "H": pool.num_heads, "N": tokens_per_block}
            if spec.containers:
                sizes["C"] = spec.containers
            if spec.containers and spec.name != "scale":
                order = layout.order
            else:
                order = layout.vector_order + ("C" if spec.containers else "")
            size = itemsize
            for extent in sizes.values():
                size *= extent
            planes.append(_Plane(spec, order, sizes, inner_strides(order, sizes, itemsize), inside, size))
            inside += align(size, PLANE_ALIGNMENT)
            payload += size
        out.append(planes)
    return out, inside, payload


@dataclass(frozen=True, slots=True)
class Geometry:
    """The places of a group's planes for a number of reserved blocks."""

    pools: tuple[PoolPlan, ...]
    ranges: tuple[BlockRange, ...]
    bytes_per_block: int
    payload_bytes_per_block: int


def place(
    pools: list[tuple[Pool, tuple[int, ...]]],
    layout: Layout,
    tokens_per_block: int,
    reserved: int,
    layer_first: bool,
    granule: int,
) -> Geometry:
    """Give every plane its offset and strides.

    Pools of the same layers are interleaved layer by layer; others follow one another.

    Args:
        pools: Pools with their layers.
        layout: Order of the axes.
        tokens_per_block: Tokens of a block; 1 for states.
        reserved: Blocks the slab has addresses for.
        layer_first: One range a layer instead of one record a block.
        granule: Smallest unit of memory; ranges of a layer-first group start at a multiple of it.
    """
    bundles: dict[tuple[int, ...], list[Pool]] = {}
    for pool, layers in pools:
        bundles.setdefault(layers, []).append(pool)
    records = {layers: _planes(members, layout, tokens_per_block) for layers, members in bundles.items()}
    total = sum(inside * len(layers) for layers, (_, inside, _) in records.items())
    bytes_per_block = align(total, BLOCK_ALIGNMENT)
    placed: list[PoolPlan] = []
    ranges: list[BlockRange] = []
    start, payload = 0, 0
    for layers, (planes, inside, size) in records.items():
        if layer_first:
            row = align(inside, BLOCK_ALIGNMENT)
            stride_b, stride_l = row, align(row * reserved, granule)
            ranges.append(BlockRange(start, row, len(layers), stride_l))
        else:
            stride_b, stride_l = bytes_per_block, inside
        for pool, members in zip(bundles[layers], planes, strict=True):
            placed.append(_pool_plan(pool, layers, layout, members, (start, stride_b, stride_l, reserved)))
        start += stride_l * len(layers)
        payload += size * len(layers)
    if layer_first:
        bytes_per_block = sum(r.row_bytes * r.num_rows for r in ranges)
    else:
        ranges.append(BlockRange(0, bytes_per_block, 1, bytes_per_block * reserved))
    return Geometry(tuple(placed), tuple(ranges), bytes_per_block, payload)


def _pool_plan(
    pool: Pool, layers: tuple[int, ...], layout: Layout, planes: list[_Plane], at: tuple[int, int, int, int]
) -> PoolPlan:
    """Turn the planes of one layer's record into planes over all blocks and layers."""
    start, stride_b, stride_l, reserved = at
    return PoolPlan(
        parts=pool.parts,
        kind=pool.kind,
        layers=layers,
        num_heads=pool.num_heads,
        vector=pool.vector,
        codec=pool.codec.name,
        layout=layout.name,
        planes=tuple(
            PlanePlan(
                name=plane.spec.name,
                dtype=plane.spec.dtype,
                order=plane.order,
                shape=(reserved, len(layers), *plane.sizes.values()),
                strides=(stride_b, stride_l, *(plane.strides[axis] for axis in plane.sizes)),
                offset=start + plane.offset,
                bytes_per_block=plane.num_bytes * len(layers),
            )
            for plane in planes
        ),
    )
