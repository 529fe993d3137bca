"""How fast are the native kernels, as a share of what the memory gives in the same run? Knows no model and no ledger.

One pool of at least 1 GiB, its blocks in random order; every repetition takes another part of it, so that no cache of
the machine holds what is read. Each repetition of a kernel is followed by one of the read probe in order, one in the
order of the block table, and one of the peer; best, median and spread are over many of them.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpool import _native
from kvpool.backends.cpu import ISAS, choose_isa, make_store
from kvpool.errors import PlanError
from kvpool.measure.shapes import CASES, Shape
from kvpool.plan import make_plan
from kvpool.pools import Pools

#: What a round through the pool reads at least: less would be read from the last-level cache of a server.
SMALLEST_POOL_BYTES = 1 << 30
BF16 = 2
#: One call of a peer: returns its seconds, measured where it ran.
Peer = Callable[[], float]


@dataclass(slots=True)
class Times:
    """Seconds of every repetition, by what was timed."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, call: Callable[[], object]) -> None:
        """Time one call."""
        start = time.perf_counter()
        call()
        self.record(name, time.perf_counter() - start)

    def record(self, name: str, seconds: float) -> None:
        """Take what was timed elsewhere."""
        self.seconds.setdefault(name, []).append(seconds)

    def best(self, name: str) -> float:
        """Shortest."""
        return min(self.seconds[name])

    def row(self, name: str) -> dict[str, float]:
        """Median in microseconds, and (p90 - p10) / median."""
        ordered = sorted(self.seconds[name])
        middle = statistics.median(ordered)
        low, high = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
        return {"p50_us": middle * 1e6, "spread": (high - low) / middle}


class Arena:
    """A pool of one layer, filled, with block tables that walk through it.

    Invariants: a round through `tables` visits at least `SMALLEST_POOL_BYTES`, every block once; all are touched.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        one = make_plan(
            shape.spec(), num_blocks=1, codec=shape.codec, layout=shape.layout, tokens_per_block=shape.tokens_per_block
        )
        per_block = one.groups[0].bytes_per_block
        self.blocks_each = -(-(shape.context) // shape.tokens_per_block)
        needed = shape.blocks_seen * shape.batch  # nothing is held outside a window
        rounds = -(-SMALLEST_POOL_BYTES // (per_block * needed))
        self.num_blocks = rounds * needed
        plan = make_plan(
            shape.spec(),
            num_blocks=self.num_blocks,
            codec=shape.codec,
            layout=shape.layout,
            tokens_per_block=shape.tokens_per_block,
        )
        self.pools = Pools(plan, touch=True)
        self.slab = self.pools.slabs[0]
        self.block_bytes = per_block
        self.workers = _native.Workers(shape.threads, choose_isa(os.environ.get("KVPOOL_CPU")))
        names = ("latent",) if shape.case == "mla" else ("k", "v")
        parts = [self.pools.part(0, name) for name in names]
        for part, scale in zip(parts, (0.013, 0.021), strict=False):
            if part.constants.needs_scale:
                part.constants.set(scale=scale)
        self.stores = [make_store(part) for part in parts]
        self._fill(parts[0].num_heads, parts[0].vector.dim)
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).int()
        self.tables = order.view(rounds, shape.batch, shape.blocks_seen)
        self.turn = 0

    def _fill(self, heads: int, dim: int) -> None:
        """Write a few blocks through the kernels and copy them over the pool."""
        n = self.shape.tokens_per_block
        first = min(self.num_blocks, max(1, 1024 // n))
        tokens = first * n
        slots = torch.arange(tokens)
        step = View(self, 1, tokens, slots)
        x = torch.randn(tokens, heads, dim).bfloat16()
        for store in self.stores:
            _native.write(self.workers, step.native, store, x.data_ptr(), BF16, x.stride(0), x.stride(1))
        rest = torch.arange(first, self.num_blocks, dtype=torch.int32)
        source = rest % first
        address, row = self.slab.address, self.block_bytes
        _native.copy_blocks(
            self.workers, address, row, 0, address, row, 0, row, 1, source.data_ptr(), rest.data_ptr(), len(rest)
        )

    def next_table(self) -> torch.Tensor:
        """Return block ids `[batch, blocks]` of the next part of the pool; -1 outside a window."""
        self.turn += 1
        seen = self.tables[self.turn % len(self.tables)]
        unseen = torch.full((len(seen), self.blocks_each - seen.shape[1]), -1, dtype=torch.int32)
        return torch.cat([unseen, seen], 1)

    def probe_in_order(self) -> tuple[Callable[[], object], int]:
        """Return a read of as many bytes as a table names, one block after another, and their number."""
        count = self.tables.shape[1] * self.shape.blocks_seen
        begin = self.turn * 7919 % max(self.num_blocks - count, 1)
        offsets = torch.arange(begin, begin + count) * self.block_bytes
        return self._probe(offsets)

    def probe_paged(self, table: torch.Tensor) -> tuple[Callable[[], object], int]:
        """Return a read of the blocks of a table in its order, and their bytes."""
        seen = table[:, self.blocks_each - self.shape.blocks_seen :]
        return self._probe(seen.flatten().long() * self.block_bytes)

    def _probe(self, offsets: torch.Tensor) -> tuple[Callable[[], object], int]:
        offsets = offsets.contiguous()
        size = self.block_bytes
        call = lambda: _native.read_probe(self.workers, self.slab.address, offsets.data_ptr(), len(offsets), size)  # noqa: E731
        return call, len(offsets) * size


class View:
    """Index arrays of a step over an arena, and the native object on them."""

    def __init__(self, arena: Arena, batch: int, rows: int, slots: torch.Tensor | None = None) -> None:
        context = arena.shape.context
        self.cu_seqlens = torch.arange(batch + 1, dtype=torch.int32) * rows
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32)
        self.table = torch.zeros(batch, arena.blocks_each, dtype=torch.int32)
        self.slots = torch.full((batch * rows,), -1, dtype=torch.int64) if slots is None else slots
        self.native = _native.StepView(
            self.cu_seqlens.data_ptr(),
            self.seq_lens.data_ptr(),
            self.table.data_ptr(),
            self.table.stride(0),
            self.slots.data_ptr(),
            batch,
            batch * rows,
            arena.shape.window,
        )
        heads = 1 if arena.shape.case == "mla" else arena.shape.kv_heads
        self.native.plan(batch, batch * rows, arena.shape.threads, heads)


def _attention_row(shape: Shape, seconds: float, peers: Mapping[str, Peer]) -> dict[str, Any]:
    """Measure decode, MLA decode or prefill."""
    arena = Arena(shape)
    view = View(arena, shape.batch, shape.rows)
    v_dim = shape.v_dim or shape.head_dim
    total = shape.batch * shape.rows
    q = torch.randn(total, shape.q_heads, shape.head_dim).bfloat16()
    out = torch.empty(total, shape.q_heads, v_dim, dtype=torch.bfloat16)
    attention = _native.Attention([arena.stores[0]], arena.stores[-1], v_dim, shape.q_heads)
    scale = shape.head_dim**-0.5
    sinks = torch.randn(shape.q_heads) if shape.sinks else None
    address = 0 if sinks is None else sinks.data_ptr()

    def kernel() -> None:
        attention(
            arena.workers, view.native, q.data_ptr(), BF16, q.stride(0), q.stride(1),
            out.data_ptr(), BF16, out.stride(0), out.stride(1), scale, 0.0, address, 0, 0, 0, 0, 0,
        )  # fmt: skip

    torch_calls = _sdpa(shape)
    times = Times()
    stop = time.monotonic() + seconds
    paged_bytes = ordered_bytes = operations = 0.0
    while time.monotonic() < stop or len(times.seconds.get("kernel", ())) < 5:
        view.table.copy_(arena.next_table())
        times.add("kernel", kernel)
        probe, ordered_bytes = arena.probe_in_order()
        times.add("read", probe)
        probe, paged_bytes = arena.probe_paged(arena.next_table())
        times.add("paged", probe)
        start = time.perf_counter()
        operations = _native.dot_probe(arena.workers)
        times.record("dot", time.perf_counter() - start)
        for name, call in torch_calls.items():
            times.add(name, call)
        for name, peer in peers.items():
            times.record(name, peer())
    best = times.best("kernel")
    # Blocks are read whole; alignment inside a block is not counted.
    payload = arena.pools.plan.groups[0].payload_bytes_per_block * shape.blocks_seen * shape.batch
    gb_s, read = payload / best / 1e9, ordered_bytes / times.best("read") / 1e9
    paged, dot = paged_bytes / times.best("paged") / 1e9, operations / times.best("dot") / 1e9
    gflop_s = 2 * shape.pairs * (shape.head_dim + v_dim) / best / 1e9
    return {
        "gb_s": gb_s,
        "ratio_read": gb_s / read,
        "ratio_paged_read": gb_s / paged,
        "read_gb_s": read,
        "paged_gb_s": paged,
        "tokens_per_s": total / best,
        "gflop_s": gflop_s,
        "ratio_dot": gflop_s / dot if dot else math.nan,
        "dot_gflop_s": dot,
        "path": attention.path(arena.workers, BF16, max(end - begin for _, begin, end, *_ in view.native.items())),
        "round_bytes": arena.tables.numel() * arena.block_bytes,
        "vs_peer": {name: times.best(name) / best for name in (*torch_calls, *peers)},
        "best_us": best * 1e6,
        **times.row("kernel"),
    }


def _sdpa(shape: Shape) -> dict[str, Callable[[], object]]:
    """Return torch's attention on contiguous bf16 keys and values of the same shape, rotating as the pool does.

    For one row a sequence also with the heads of a group as rows, which is the same answer and far faster on some CPUs.
    """
    if shape.case == "mla" or shape.sinks or shape.window:
        return {}
    size = shape.batch * shape.kv_heads * shape.context * shape.head_dim
    rounds = max(1, -(-SMALLEST_POOL_BYTES // (4 * size)))
    k, v = (
        torch.randn(2, 1, shape.batch, shape.kv_heads, shape.context, shape.head_dim)
        .bfloat16()
        .repeat(1, rounds, 1, 1, 1, 1)
    )
    q = torch.randn(shape.batch, shape.q_heads, shape.rows, shape.head_dim).bfloat16()
    position = torch.arange(shape.context - shape.rows, shape.context)[:, None]
    mask = (torch.arange(shape.context)[None, :] <= position) if shape.rows > 1 else None
    turn = iter(range(1 << 62))

    def grouped() -> None:
        i = next(turn) % rounds
        torch.nn.functional.scaled_dot_product_attention(q, k[i], v[i], attn_mask=mask, enable_gqa=True)

    def as_rows() -> None:
        i = next(turn) % rounds
        rows = q.view(shape.batch, shape.kv_heads, -1, shape.head_dim)
        torch.nn.functional.scaled_dot_product_attention(rows, k[i], v[i])

    return {"torch_sdpa": grouped} if shape.rows > 1 else {"torch_sdpa": grouped, "torch_sdpa_rows": as_rows}


def _write_row(shape: Shape, seconds: float, peers: Mapping[str, Peer]) -> dict[str, Any]:
    """Measure append: bf16 keys and values of `rows` tokens into blocks of the table."""
    arena = Arena(shape)
    tokens = shape.rows
    blocks = -(-tokens // shape.tokens_per_block)
    slots = torch.zeros(tokens, dtype=torch.int64)
    view = View(arena, 1, tokens, slots)
    sources = max(4, SMALLEST_POOL_BYTES // 4 // (4 * tokens * shape.kv_heads * shape.head_dim))
    x = torch.randn(1, 2, tokens, shape.kv_heads, shape.head_dim).bfloat16().repeat(sources, 1, 1, 1, 1)
    size = x[0].numel() * x.element_size()
    source, target = itertools.cycle(x), itertools.cycle(torch.empty_like(x))
    order = arena.tables.flatten()
    token = torch.arange(tokens)
    k_store, v_store = arena.stores
    times = Times()
    turn = 0

    def append() -> float:
        """Write the next source into the next blocks; return the seconds."""
        nonlocal turn
        begin = turn * blocks % max(len(order) - blocks, 1)
        turn += 1
        ids = order[begin : begin + blocks].long()
        slots.copy_(ids[token // shape.tokens_per_block] * shape.tokens_per_block + token % shape.tokens_per_block)
        k, v = next(source)
        start = time.perf_counter()
        _native.write_kv(
            arena.workers, view.native, k_store, k.data_ptr(), k.stride(0), k.stride(1),
            v_store, v.data_ptr(), v.stride(0), v.stride(1), BF16,
        )  # fmt: skip
        return time.perf_counter() - start

    def copy() -> float:
        """Copy the next source with memcpy; return the seconds."""
        a, b = next(source), next(target)
        start = time.perf_counter()
        _native.copy_probe(arena.workers, b.data_ptr(), a.data_ptr(), size)
        return time.perf_counter() - start

    # Each of both is called twice, and the second call counts: the first pays for what the other left in the
    # last-level cache, which memcpy fills with lines still to be written. Nothing is read again before all else was.
    stop = time.monotonic() + seconds
    while time.monotonic() < stop or turn < 10:
        for name, call in (("kernel", append), ("copy", copy)):
            call()
            times.record(name, call())
        for name, peer in peers.items():
            times.record(name, peer())
    best = times.best("kernel")
    return {
        "gb_s": size / best / 1e9,
        "ratio_copy": times.best("copy") / best,
        "copy_gb_s": size / times.best("copy") / 1e9,
        "tokens_per_s": tokens / best,
        "path": ISAS[arena.workers.isa],
        "round_bytes": arena.slab.committed_bytes,
        "vs_peer": {name: times.best(name) / best for name in peers},
        "best_us": best * 1e6,
        **times.row("kernel"),
    }


def _copy_row(shape: Shape, seconds: float, peers: Mapping[str, Peer]) -> dict[str, Any]:
    """Measure copies of whole blocks between random ids."""
    arena = Arena(shape)
    count = max(1, min((32 << 20) // arena.block_bytes, arena.num_blocks // 8))
    order = arena.tables.flatten()
    size = count * arena.block_bytes
    address, row = arena.slab.address, arena.block_bytes
    times = Times()
    turn = 0
    stop = time.monotonic() + seconds
    while time.monotonic() < stop or turn < 5:
        begin = turn * 2 * count % (len(order) - 2 * count)
        src, dst = order[begin : begin + count].contiguous(), order[begin + count : begin + 2 * count].contiguous()
        times.add(
            "kernel",
            lambda s=src, d=dst: _native.copy_blocks(  # type: ignore[misc]
                arena.workers, address, row, 0, address, row, 0, row, 1, s.data_ptr(), d.data_ptr(), count
            ),
        )
        turn += 1
        a = address + turn * 7919 * 4096 % (arena.num_blocks * row // 2 - size)
        times.add(
            "copy",
            lambda a=a: _native.copy_probe(arena.workers, a + arena.num_blocks * row // 2, a, size),  # type: ignore[misc]
        )
        for name, peer in peers.items():
            times.record(name, peer())
    best = times.best("kernel")
    return {
        "gb_s": size / best / 1e9,
        "ratio_copy": times.best("copy") / best,
        "copy_gb_s": size / times.best("copy") / 1e9,
        "tokens_per_s": count * shape.tokens_per_block / best,
        "path": "copy",
        "round_bytes": arena.slab.committed_bytes,
        "vs_peer": {name: times.best(name) / best for name in peers},
        "best_us": best * 1e6,
        **times.row("kernel"),
    }


def measure(shape: Shape, seconds: float, peers: Mapping[str, Peer] | None = None) -> dict[str, Any]:
    """Return one row of the bench.

    Args:
        shape: What is measured.
        seconds: Time for it.
        peers: Others that do the same work; each is called once a repetition.

    Raises:
        PlanError: The case is unknown, the heads do not fit, or a round would read less than `SMALLEST_POOL_BYTES`.
    """
    if shape.case not in CASES:
        raise PlanError(f"unknown bench {shape.case!r}; known: {', '.join(CASES)}")
    if shape.q_heads % shape.kv_heads:
        raise PlanError(f"{shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads")
    kinds = {"write": _write_row, "copy": _copy_row}
    row = kinds.get(shape.case, _attention_row)(shape, seconds, peers or {})
    if row["round_bytes"] < SMALLEST_POOL_BYTES:
        raise PlanError(f"a round reads {row['round_bytes']:,} bytes only; at least {SMALLEST_POOL_BYTES:,} are needed")
    named = ("case", "model", "codec", "layout", "tokens_per_block", "context", "batch", "rows", "q_heads", "kv_heads",
             "head_dim", "threads")  # fmt: skip
    return {name: getattr(shape, name) for name in named} | {"vs_bf16": math.nan} | row


def compare(rows: Sequence[dict[str, Any]], baseline: str) -> None:
    """Fill `vs_bf16` of every row: its tokens per second against the baseline's in the same layout and block size."""
    names = ("case", "model", "layout", "tokens_per_block", "q_heads", "kv_heads", "head_dim", "threads")
    for row in rows:
        for other in rows:
            if other["codec"] == baseline and all(row[name] == other[name] for name in names):
                row["vs_bf16"] = row["tokens_per_s"] / other["tokens_per_s"]
