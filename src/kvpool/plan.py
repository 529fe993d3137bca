"""Budget in, groups, pools and planes out: the one place where a size, offset or stride is computed.

A plan is plain data: frozen, serialisable, made without torch. Strides and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvpool.codecs import Codec, Vector, get_codec
from kvpool.dtypes import dtype
from kvpool.errors import PlanError
from kvpool.kinds import FULL, IndexerKind, Kind, KVKind, LatentKind, Lifetime, SharedKind, StateKind
from kvpool.layout import Layout, inner_strides
from kvpool.layout import layout as get_layout
from kvpool.spec import CacheSpec

#: Every plane of a layer starts at a multiple of this inside a block (one cache line pair; TMA needs 128).
PLANE_ALIGNMENT = 128
#: A block is a multiple of this.
BLOCK_ALIGNMENT = 256
#: Latents keep one scale for each so many channels (DeepSeek's FP8 block size).
LATENT_SCALE_CHANNELS = 128
#: Smallest memory unit on a CPU; see pools.memory.
CPU_GRANULE_BYTES = 4096


def align(value: int, to: int) -> int:
    """Round `value` up to a multiple of `to`."""
    return -(-value // to) * to


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
        kind: What the layers store.
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
        layer_first: True when the slab is one range a layer, so that a block is `len(layers)` pieces.
        layer_pitch_bytes: Layer-first only: bytes from one layer's range to the next.
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
    layer_first: bool = False
    layer_pitch_bytes: int = 0

    @property
    def is_state(self) -> bool:
        """True for a group of recurrent states."""
        return self.lifetime is None

    @property
    def slab_bytes(self) -> int:
        """Bytes of the reserved address range."""
        if self.layer_first:
            return self.layer_pitch_bytes * len(self.layers)
        return self.bytes_per_block * self.num_blocks_reserved

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
        whole = -(-num_tokens // n)
        if self.lifetime.window is not None:
            seen = -(-self.lifetime.sink_tokens // n) + -(-(self.lifetime.window - 1) // n) + 1
            return min(whole, seen + -(-max_step_tokens // n))
        if self.lifetime.chunk is not None:
            c = self.lifetime.chunk
            return min(whole, -(-c // n) + (1 if c % n else 0) + -(-max_step_tokens // n))
        return whole


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups, pools and planes for a budget; settles every shape for the life of the cache."""

    spec: CacheSpec
    groups: tuple[GroupPlan, ...]
    tokens_per_block: int
    budget_bytes: int
    max_budget_bytes: int
    bound_by: str
    granule_bytes: int
    max_seq_len: int
    typical_seq_len: int
    max_sequences: int
    max_step_tokens: int
    num_draft: int
    checkpoint_interval: int
    notes: tuple[str, ...] = field(default=())

    @property
    def used_bytes(self) -> int:
        """Bytes committed at the start, in whole granules."""
        return sum(committed_bytes(group, group.num_blocks, self.granule_bytes) for group in self.groups)

    @property
    def left_over_bytes(self) -> int:
        """Bytes of the budget too few for one more block of any group."""
        return self.budget_bytes - self.used_bytes

    def find(self, layer: int, part: str) -> tuple[int, PoolPlan, int, int]:
        """Return (group index, pool, index on L, index on F) of a part of a layer.

        Args:
            layer: Model layer; a layer that shares another's cache answers for its source.
            part: `k`, `v`, `latent`, `rope`, `index`, or the name of a state.
        """
        layer = self.source_layer(layer)
        for index, group in enumerate(self.groups):
            for pool in group.pools:
                if part in pool.parts and layer in pool.layers:
                    return index, pool, pool.layers.index(layer), pool.parts.index(part)
        raise PlanError(f"layer {layer} stores no {part!r}")

    def source_layer(self, layer: int) -> int:
        """Return the layer whose cache `layer` reads: itself, unless it shares another's."""
        for kind in self.spec.layers[layer].kinds:
            if isinstance(kind, SharedKind):
                return kind.source_layer
        return layer


def committed_bytes(group: GroupPlan, num_blocks: int, granule_bytes: int) -> int:
    """Bytes of memory behind the first `num_blocks` blocks of a group, in whole granules."""
    if group.layer_first:
        row = group.bytes_per_block // len(group.layers)
        return align(row * num_blocks, granule_bytes) * len(group.layers)
    return align(group.bytes_per_block * num_blocks, granule_bytes)


# --- from kinds to pools ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool before its planes have places."""

    parts: tuple[str, ...]
    kind: Kind
    num_heads: int
    vector: Vector
    codec: Codec


def _pools_of(kind: Kind, codecs: Mapping[str, str]) -> list[_Pool]:
    """Split what a layer stores into pools: one for each codec and vector size."""

    def pool(parts: tuple[str, ...], heads: int, segments: tuple[int, ...], part: str = "") -> _Pool:
        return _Pool(parts, kind, heads, Vector(segments), get_codec(codecs[part or parts[0]]))

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
        return [_Pool((kind.name,), kind, 1, Vector((kind.shape[-1],) * rows), get_codec(name))]
    return []


def _split(dim: int, size: int) -> tuple[int, ...]:
    """Cut `dim` into pieces of at most `size`."""
    return (size,) * (dim // size) + ((dim % size,) if dim % size else ())


#: Keys a codec mapping may have.
CODEC_KEYS = ("*", "k", "v", "latent", "rope", "index", "layers")


def resolve_codecs(codec: str | Mapping[str, object] | None, spec: CacheSpec) -> list[dict[str, str]]:
    """Return, for every layer, the codec name of each part.

    Args:
        codec: A name for K, V and latents; or a mapping with the keys `*`, `k`, `v`, `latent`, `rope`, `index`, names of
            states, and `layers` ({0: "bf16", -1: "bf16"} or a mapping of the same form for one layer).
        spec: The model.
    """
    states = {k.name for layer in spec.layers for k in layer.kinds if isinstance(k, StateKind)}

    def expand(given: str | Mapping[str, object], base: Mapping[str, str]) -> dict[str, str]:
        if isinstance(given, str):
            return {**base, **dict.fromkeys(("k", "v", "latent", "rope"), given)}
        out = dict(base)
        if "*" in given:
            out = expand(str(given["*"]), out)
        for key, name in given.items():
            if key not in CODEC_KEYS and key not in states:
                raise PlanError(
                    f"codec mapping has the key {key!r}; allowed: {', '.join((*CODEC_KEYS, *sorted(states)))}"
                )
            if key == "latent" and "rope" not in given:
                out["rope"] = str(name)
            if key not in ("*", "layers"):
                out[key] = str(name)
        return out

    base = expand(spec.dtype if codec is None else codec, expand(spec.dtype, {"index": "index-fp8"}))
    layers = [base] * spec.num_layers
    overrides = codec.get("layers", {}) if isinstance(codec, Mapping) else {}
    if not isinstance(overrides, Mapping):
        raise PlanError(f"codec['layers'] must map layer numbers to codecs, got {overrides!r}")
    for index, given in overrides.items():
        try:
            layers[int(index)] = expand(given, base)
        except IndexError:
            raise PlanError(f"codec['layers'] names layer {index}; the model has {spec.num_layers}") from None
    return layers


# --- from pools to places -----------------------------------------------------------------------------------


def _place(
    pools: list[tuple[_Pool, tuple[int, ...]]],
    layout: Layout,
    tokens_per_block: int,
    reserved: int,
    layer_first: bool,
    granule: int,
) -> tuple[tuple[PoolPlan, ...], int, int, int]:
    """Give every plane its offset and strides.

    Pools of the same layers are interleaved layer by layer; others follow one another.

    Returns:
        (pools, bytes_per_block, payload bytes, bytes between two layers' ranges when layer-first).
    """
    bundles: dict[tuple[int, ...], list[_Pool]] = {}
    for pool, layers in pools:
        bundles.setdefault(layers, []).append(pool)
    placed: list[
        tuple[_Pool, tuple[int, ...], list[tuple[str, str, str, dict[str, int], dict[str, int], int, int]], int]
    ] = []
    start, payload = 0, 0
    rows: dict[tuple[int, ...], int] = {}
    for layers, members in bundles.items():
        inside = 0
        for pool in members:
            planes = []
            for spec in pool.codec.planes(pool.vector):
                item = dtype(spec.dtype).itemsize
                sizes = {"F": len(pool.parts), "H": pool.num_heads, "N": tokens_per_block}
                if spec.containers and spec.name != "scale":
                    order = layout.order
                else:
                    order = layout.vector_order + ("C" if spec.containers else "")
                if spec.containers:
                    sizes["C"] = spec.containers
                size = item
                for extent in sizes.values():
                    size *= extent
                planes.append((spec.name, spec.dtype, order, sizes, inner_strides(order, sizes, item), inside, size))
                inside += align(size, PLANE_ALIGNMENT)
                payload += size * len(layers)
            placed.append((pool, layers, planes, start))
        rows[layers] = align(inside, BLOCK_ALIGNMENT) if layer_first else inside
        start += rows[layers] * len(layers)
    bytes_per_block = start if layer_first else align(start, BLOCK_ALIGNMENT)
    pitch = 0
    if layer_first:
        if len(bundles) != 1:
            raise PlanError("a layer-first group needs the same pools on all its layers; split it by layers")
        pitch = align(next(iter(rows.values())) * reserved, granule)
    out = []
    for pool, layers, planes, begin in placed:
        stride_b, stride_l = (rows[layers], pitch) if layer_first else (bytes_per_block, rows[layers])
        out.append(
            PoolPlan(
                parts=pool.parts,
                kind=pool.kind,
                layers=layers,
                num_heads=pool.num_heads,
                vector=pool.vector,
                codec=pool.codec.name,
                layout=layout.name,
                planes=tuple(
                    PlanePlan(
                        name=name,
                        dtype=element,
                        order=order,
                        shape=(reserved, len(layers), *sizes.values()),
                        strides=(stride_b, stride_l, *(strides[a] for a in sizes)),
                        offset=(0 if layer_first else begin) + inside,
                        bytes_per_block=size * len(layers),
                    )
                    for name, element, order, sizes, strides, inside, size in planes
                ),
            )
        )
    return tuple(out), bytes_per_block, payload, pitch


def _groups(
    spec: CacheSpec, codecs: list[dict[str, str]], layers: range
) -> dict[tuple[str, Lifetime | None], list[tuple[_Pool, tuple[int, ...]]]]:
    """Collect the pools of every lifetime, with the layers that have them."""
    found: dict[tuple[str, Lifetime | None], dict[tuple[object, ...], tuple[_Pool, list[int]]]] = {}
    for index in layers:
        for kind in spec.layers[index].kinds:
            for pool in _pools_of(kind, codecs[index]):
                lifetime = None if isinstance(kind, StateKind) else spec.layers[index].lifetime
                if lifetime is not None and lifetime.window is not None and lifetime.window >= spec.max_seq_len:
                    lifetime = FULL
                group = found.setdefault((lifetime.name if lifetime else "state", lifetime), {})
                key = (pool.parts, pool.kind, pool.codec.name)
                group.setdefault(key, (pool, []))[1].append(index)
    return {name: [(pool, tuple(ls)) for pool, ls in pools.values()] for name, pools in found.items()}


def make_plan(
    spec: CacheSpec,
    budget: int,
    *,
    codec: str | Mapping[str, object] | None = None,
    layout: str = "HND",
    tokens_per_block: int = 32,
    max_seq_len: int | None = None,
    typical_seq_len: int | None = None,
    max_budget: int | None = None,
    max_sequences: int = 64,
    max_step_tokens: int = 2048,
    num_draft: int = 0,
    checkpoint_interval: int = 1024,
) -> Plan:
    """Settle every shape of a cache for a budget of bytes.

    Raises:
        PlanError: A number is out of range, or the budget holds less than one block of some group.
    """
    if tokens_per_block < 2 or tokens_per_block & (tokens_per_block - 1):
        raise PlanError(
            f"tokens_per_block must be a power of two of at least 2, got {tokens_per_block}; use 16, 32 or 64"
        )
    budget = int(budget)
    if budget <= 0:
        raise PlanError(f"budget must be positive, got {budget}")
    max_budget = budget if max_budget is None else max_budget
    order = get_layout(layout)
    max_seq_len = spec.max_seq_len if max_seq_len is None else max_seq_len
    typical = min(max_seq_len, 8192) if typical_seq_len is None else typical_seq_len
    granule = CPU_GRANULE_BYTES
    groups = []
    for (name, lifetime), pools in _groups(spec, resolve_codecs(codec, spec), range(spec.num_layers)).items():
        n = 1 if lifetime is None else tokens_per_block
        first = lifetime is None
        _, per_block, _, _ = _place(pools, order, n, 1, first, granule)
        reserved = max(max_budget // per_block, 1)
        placed, per_block, payload, pitch = _place(pools, order, n, reserved, first, granule)
        covered = tuple(sorted({layer for pool in placed for layer in pool.layers}))
        groups.append(GroupPlan(name, lifetime, covered, 0, reserved, n, per_block, payload, placed, first, pitch))
    need = [g.blocks_for(typical, checkpoints=-(-typical // checkpoint_interval)) for g in groups]
    cost = sum(n * g.bytes_per_block for n, g in zip(need, groups, strict=True))
    groups = [replace(g, num_blocks=budget * n // cost) for n, g in zip(need, groups, strict=True)]
    _fit(groups, budget, granule)
    for group in groups:
        if group.num_blocks < 1:
            raise PlanError(
                f"a budget of {budget} bytes holds no block of group {group.name!r} ({group.bytes_per_block} bytes a block of"
                f" {group.tokens_per_block} tokens); give at least {sum(align(g.bytes_per_block, granule) for g in groups)} bytes"
            )
    return Plan(
        spec, tuple(groups), tokens_per_block, budget, max_budget, "budget", granule, max_seq_len, typical, max_sequences,
        max_step_tokens, num_draft, checkpoint_interval, spec.notes,
    )  # fmt: skip


def _fit(groups: list[GroupPlan], budget: int, granule: int) -> None:
    """Take blocks away until granules fit the budget, then add while one more block of a group fits."""
    used = [committed_bytes(g, g.num_blocks, granule) for g in groups]
    for i, g in enumerate(groups):
        while sum(used) > budget and groups[i].num_blocks > 0:
            groups[i] = g = replace(g, num_blocks=g.num_blocks - 1)
            used[i] = committed_bytes(g, g.num_blocks, granule)
    for i, g in enumerate(groups):
        while groups[i].num_blocks < g.num_blocks_reserved:
            more = committed_bytes(g, groups[i].num_blocks + 1, granule)
            if sum(used) - used[i] + more > budget:
                break
            groups[i] = replace(groups[i], num_blocks=groups[i].num_blocks + 1)
            used[i] = more
