"""The plan: a model, a format and a budget settled into groups, pools and planes.

A plan is plain data: frozen, serialisable, made without torch. Strides and offsets are bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool.codecs import get_codec
from kvpool.errors import PlanError
from kvpool.kinds import SharedKind
from kvpool.layout import layout as get_layout
from kvpool.plan import describe, serialise, sizing
from kvpool.plan.address import ElementAddress, element_address
from kvpool.plan.budget import count
from kvpool.plan.geometry import Geometry, GroupPlan, Pool, PoolPlan, place
from kvpool.plan.sizing import Capacity, Load
from kvpool.spec import CacheSpec

#: Lengths that reports count sequences for.
CONTEXTS = (4096, 32768, 131072)
#: Changes whenever the same plan would lie differently in memory or on disk.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Blocks of a slower tier.

    Attributes:
        name: `host` or `disk`.
        budget_bytes: What the tier may take.
        num_blocks: Blocks of each group, in the order of the plan's groups.
    """

    name: str
    budget_bytes: int
    num_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups, pools and planes for a budget; settles every shape for the life of the cache.

    Attributes:
        budget_bytes: What the slabs may commit.
        max_budget_bytes: What `resize` may go up to: addresses are reserved for it.
        bound_by: The limit that was the least: `budget`, `memory_fraction`, `max_tokens` or `num_blocks`.
        granule_bytes: Smallest unit in which memory is committed.
        layers: The layers this pipeline stage holds.
        notes: Whatever was inferred, rounded, clamped or does not fit, one sentence each.
    """

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
    device: str = "cpu"
    tp_rank: int = 0
    tp_size: int = 1
    layers: range = range(0)
    tiers: tuple[TierPlan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def load(self) -> Load:
        """What the plan is sized for."""
        return Load(
            self.typical_seq_len, self.max_sequences, self.max_step_tokens, self.num_draft, self.checkpoint_interval
        )

    @property
    def used_bytes(self) -> int:
        """Bytes committed at the start, in whole granules."""
        return sum(group.committed_bytes(group.num_blocks, self.granule_bytes) for group in self.groups)

    @property
    def left_over_bytes(self) -> int:
        """Bytes of the budget that no block uses."""
        return self.budget_bytes - self.used_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, in sequences of the typical length (in whole blocks)."""
        return sizing.tokens_that_fit(self.groups, self.load).value

    def sequences(self, num_tokens: int) -> Capacity:
        """Return how many sequences of `num_tokens` can be decoded together, and the group that limits it."""
        return sizing.sequences_that_fit(self.groups, count("num_tokens", num_tokens), self.load)

    def longest_sequence(self, batch: int = 1) -> Capacity:
        """Return the longest length (up to `max_seq_len`) that `batch` sequences can have together."""
        return sizing.longest_sequence(self.groups, count("batch", batch), self.max_seq_len, self.load)

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
        has = [p for group in self.groups for pool in group.pools if layer in pool.layers for p in pool.parts]
        raise PlanError(f"layer {layer} stores no {part!r}; it stores {', '.join(has) or 'nothing'}")

    def address(self, block: int, layer: int, part: str, head: int = 0, token: int = 0, dim: int = 0) -> ElementAddress:
        """Return where an element lies in its group's slab, with every product named and its scales beside it.

        Args:
            block: Block id.
            layer: Model layer.
            part: `k`, `v`, `latent`, `rope`, `index`, or the name of a state.
            head: KV head on this rank.
            token: Token in the block.
            dim: Element of the vector.

        Raises:
            PlanError: An index is out of range, or the layer stores no such part.
        """
        group, pool, index, factor = self.find(layer, part)
        return element_address(self.groups[group], pool, index, factor, block, head, token, dim)

    def source_layer(self, layer: int) -> int:
        """Return the layer whose cache `layer` reads: itself, unless it shares another's."""
        if not 0 <= layer < self.spec.num_layers:
            raise PlanError(f"layer {layer} does not exist; the model has layers 0..{self.spec.num_layers - 1}")
        for kind in self.spec.layers[layer].kinds:
            if isinstance(kind, SharedKind):
                return kind.source_layer
        return layer

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides a byte: equal in every process, another when a byte moves."""
        spec = replace(self.spec, notes=(), model="", kv_codec_hint="")
        return _digest(serialise.encode(replace(self, notes=(), spec=spec)))

    @property
    def block_format(self) -> str:
        """SHA-256 (hex) of what one block is: spec, codecs, planes and strides inside it, rank; no counts, no budget.

        Plans with equal block formats can hand each other whole blocks.
        """
        spec = replace(self.spec, notes=(), model="", kv_codec_hint="", max_seq_len=1)
        groups = [[g.name, g.tokens_per_block, serialise.encode(g.lifetime), _inside(g)] for g in self.groups]
        return _digest([serialise.encode(spec), groups, self.tp_rank, self.tp_size])

    def to_json(self) -> str:
        """Return the plan as JSON text that `from_json` reads back."""
        return json.dumps({"format": FORMAT, "fingerprint": self.fingerprint, "plan": serialise.encode(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back.

        Raises:
            PlanError: The text is no plan, is damaged, or was written in another format.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"a plan's JSON cannot be read: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PlanError(f"a plan of format {FORMAT} is expected, found {found!r}; make it again with make_plan")
        plan = serialise.decode(data.get("plan"), cls)
        if data.get("fingerprint") != plan.fingerprint:
            raise PlanError("the plan's fingerprint does not match its content; make it again with make_plan")
        plan.check()
        return plan

    def check(self) -> None:
        """Verify that every offset and stride is what `make_plan` gives, and that the budget holds.

        Raises:
            PlanError: A group differs, or commits more than the budget.
        """
        for group in self.groups:
            layout = get_layout(group.pools[0].layout) if group.pools else None
            pools = [(Pool(p.parts, p.kind, p.num_heads, p.vector, get_codec(p.codec)), p.layers) for p in group.pools]
            if layout is None or place(
                pools, layout, group.tokens_per_block, group.num_blocks_reserved, group.layer_first, self.granule_bytes
            ) != Geometry(group.pools, group.ranges, group.bytes_per_block, group.payload_bytes_per_block):
                raise PlanError(f"group {group.name!r} has planes in places that no plan gives them")
        if self.used_bytes > self.budget_bytes:
            raise PlanError(f"groups commit {self.used_bytes} bytes, above the budget of {self.budget_bytes}")

    def to_dict(self, contexts: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the plan as plain data: what `kvpool plan --json` prints.

        Args:
            contexts: Lengths to count sequences for; by default 4,096, 32,768 and 131,072, and `max_seq_len` where it
                is shorter than all of them.
        """
        if contexts is None:
            contexts = [*([self.max_seq_len] if self.max_seq_len < CONTEXTS[0] else []), *CONTEXTS]
        committed = [g.committed_bytes(g.num_blocks, self.granule_bytes) for g in self.groups]
        blocks = sum(g.bytes_per_block * g.num_blocks for g in self.groups)
        groups = [
            {**describe.describe_group(g), "committed_bytes": c} for g, c in zip(self.groups, committed, strict=True)
        ]
        return {
            "model": self.spec.model,
            "bound_by": self.bound_by,
            "budget_bytes": self.budget_bytes,
            "max_budget_bytes": self.max_budget_bytes,
            "used_bytes": self.used_bytes,
            "left_over_bytes": self.left_over_bytes,
            "alignment_bytes": sum(g.num_blocks * (g.bytes_per_block - g.payload_bytes_per_block) for g in self.groups),
            "granule_bytes_lost": sum(committed) - blocks,
            "tokens_per_block": self.tokens_per_block,
            "num_tokens": self.num_tokens,
            "max_seq_len": self.max_seq_len,
            "typical_seq_len": self.typical_seq_len,
            "bytes_per_token": describe.bytes_per_token(self.groups, self.spec),
            "state_bytes_per_sequence": describe.state_bytes(self.groups),
            "sequences": {str(n): self.sequences(n).value for n in contexts},
            "longest_sequence": self.longest_sequence().value,
            "notes": list(self.notes),
            "fingerprint": self.fingerprint,
            "block_format": self.block_format,
            "tp": {"rank": self.tp_rank, "size": self.tp_size},
            "tiers": {name: self._tier(name) for name in ("host", "disk")},
            "groups": groups,
        }

    def _tier(self, name: str) -> dict[str, Any]:
        """Return a slower tier as plain data; zeros for one without a budget."""
        found = next((t for t in self.tiers if t.name == name), TierPlan(name, 0, (0,) * len(self.groups)))
        used = sum(g.bytes_per_block * n for g, n in zip(self.groups, found.num_blocks, strict=True))
        return {
            "budget_bytes": found.budget_bytes,
            "used_bytes": used,
            "left_over_bytes": found.budget_bytes - used,
            "num_blocks": {g.name: n for g, n in zip(self.groups, found.num_blocks, strict=True)},
        }

    def __str__(self) -> str:
        return describe.table(self.to_dict())


def _digest(data: object) -> str:
    text = json.dumps({"format": FORMAT, "data": data}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _inside(group: GroupPlan) -> list[Any]:
    """What a block of a group is, wherever its rows lie."""
    out: list[Any] = [[r.row_bytes, r.num_rows] for r in group.ranges]
    for pool in group.pools:
        planes = []
        for plane in pool.planes:
            start = max(r.offset for r in group.ranges if r.offset <= plane.offset)
            strides = plane.strides[2:] if group.layer_first else plane.strides
            planes.append([plane.name, plane.dtype, plane.offset - start, plane.shape[1:], strides])
        out.append([pool.parts, serialise.encode(pool.kind), pool.layers, pool.vector.segments, pool.codec, planes])
    return out
