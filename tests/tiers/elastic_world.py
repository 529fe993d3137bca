"""Caches whose memory moves between groups, filled to the brim; and the best split that could be chosen instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kvpool as kv

from .tiered_world import FULL, N, World


class Roomy(World):
    """A world whose budget may grow to `room` times what it starts with."""

    def __init__(
        self, layers: Any = FULL, *, budget: int, room: int = 4, backend: str = "reference", max_seq_len: int = 4096,
        **options: Any,
    ) -> None:  # fmt: skip
        self.spec = kv.CacheSpec(layers=layers, dtype="fp32", max_seq_len=max_seq_len)
        self.options = {
            "codec": "fp32", "tokens_per_block": N, "max_sequences": 64, "max_step_tokens": 2048, **options,
        }  # fmt: skip
        self.plan = kv.make_plan(self.spec, budget=budget, max_budget=room * budget, **self.options)
        self.cache = kv.KVCache(self.plan, backend=backend)

    def addresses(self) -> list[tuple[int, ...]]:
        parts = [self.cache.pools.part(layer, part) for layer in range(len(self.spec.layers)) for part in "kv"]
        tables = [t.data_ptr() for b in self.cache._buffers for g in b.groups for t in (g.block_table, g.slots)]
        return [(p.address, *p.strides) for part in parts for p in part.planes.values()] + [tuple(tables)]

    def hold(self, length: int, most: int, chunk: int) -> int:
        """Open sequences of a length until no more fit; returns how many. Some are verified, all are released.

        Args:
            length: Tokens of each.
            most: Open no more than so many.
            chunk: Tokens computed at once: a window needs room for them beside what it sees.
        """
        seqs: list[kv.Sequence] = []
        while len(seqs) < most:
            try:
                seq = self.open([len(seqs) * self.plan.max_seq_len + i for i in range(length)])
            except kv.OutOfBlocks:
                break
            try:
                while seq.num_computed_tokens < length:
                    self.step(seq, most=chunk)
            except kv.OutOfBlocks:
                seq.release(keep=False)
                break
            seqs.append(seq)
            assert self.cache._elastic.committed_bytes <= self.plan.budget_bytes
        for seq in seqs[:: max(1, len(seqs) // 3)]:
            self.verify(seq)
        self.cache.check()
        for seq in seqs:
            seq.release()
        return len(seqs)

    def best_split(self, length: int, most: int) -> int:
        """Return how many sequences of a length the best static split of full layers and windows holds."""
        window = next(group.name for group in self.plan.groups if group.name != "full")
        best = 0
        for share in [i / 100 for i in range(1, 100)]:
            try:
                shares = {"full": share, window: 1 - share}
                plan = kv.make_plan(self.spec, budget=self.plan.budget_bytes, shares=shares, **self.options)
            except kv.PlanError:
                continue
            need = [group.blocks_for(length) for group in plan.groups]
            best = max(best, min(group.num_blocks // n for group, n in zip(plan.groups, need, strict=True)))
        return min(best, most)


def resident(cache: kv.KVCache) -> int:
    """Bytes of the reserved ranges that the system keeps in memory."""
    total = 0
    ranges = [(slab.address, slab.address + slab.memory.reserved_bytes) for slab in cache.pools.slabs]
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            start, stop = int(found[1], 16), int(found[2], 16)
            inside = any(a <= start and stop <= b + (2 << 20) for a, b in ranges)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
