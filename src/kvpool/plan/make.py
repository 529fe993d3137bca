"""`make_plan`: from a model, a format and limits to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvpool.errors import PlanError
from kvpool.kinds import Lifetime, SharedKind
from kvpool.layout import Layout
from kvpool.layout import layout as get_layout
from kvpool.plan import sizing
from kvpool.plan.budget import (
    DEFAULT_FRACTION,
    GRANULES,
    MAX_BYTES,
    count,
    device_type,
    format_bytes,
    free_bytes,
    parse_bytes,
)
from kvpool.plan.codec_map import CodecChoice, resolve_codecs
from kvpool.plan.geometry import Grouped, GroupPlan, Pool, group_pools, place
from kvpool.plan.plan import Plan, TierPlan
from kvpool.plan.sizing import Load
from kvpool.spec import CacheSpec


def make_plan(
    spec: CacheSpec,
    budget: int | str | None = None,
    *,
    memory_fraction: float | None = None,
    max_tokens: int | None = None,
    num_blocks: int | Mapping[str, int] | None = None,
    codec: CodecChoice = None,
    layout: str = "HND",
    layer_first: bool = False,
    tokens_per_block: int = 32,
    max_seq_len: int | None = None,
    typical_seq_len: int | None = None,
    shares: Mapping[str, float] | None = None,
    max_budget: int | str | None = None,
    max_sequences: int = 64,
    max_step_tokens: int = 2048,
    num_draft: int = 0,
    checkpoint_interval: int = 1024,
    host_budget: int | str = 0,
    disk_budget: int | str = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    layers: range | None = None,
    device: str = "cpu",
) -> Plan:
    """Settle every shape of a cache. The budget is the least of `budget`, `memory_fraction` and `max_tokens`.

    Args:
        spec: The model.
        budget: Bytes, or text such as `4GiB`.
        memory_fraction: Part of the memory free now, in (0, 1]. Without any limit: 0.5 of what the cgroup and the
            system leave on a CPU, 0.9 of the free memory of a GPU.
        max_tokens: Tokens to hold in sequences of `typical_seq_len`, rounded up to whole blocks.
        num_blocks: Blocks of every group, or a mapping from group name; must fit the budget if one is given.
        codec: A codec's name, or a mapping (see `codec_map.resolve_codecs`); the model's dtype by default.
        layout: `HND` or `NHD`.
        layer_first: One range a layer instead of one record a block (state groups always are).
        tokens_per_block: Power of two, at least 2.
        max_seq_len: Longest sequence; the model's own by default. Windows not shorter than this become full layers.
        typical_seq_len: Length the groups' shares are made for; by default `max_seq_len`, at most 8,192.
        shares: Parts of the budget by group name, adding up to 1; by default in proportion to need.
        max_budget: What the cache may be resized to; addresses are reserved for it. `budget` by default.
        max_sequences: Sequences of one step.
        max_step_tokens: Tokens of one step.
        num_draft: Speculated tokens a sequence in one step.
        checkpoint_interval: Tokens between two checkpoints of windows and states.
        host_budget: Bytes of the host tier.
        disk_budget: Bytes of the disk tier.
        tp_rank: This rank.
        tp_size: Tensor-parallel ranks; KV heads are split, or repeated when fewer than ranks.
        layers: Layers of this pipeline stage; all by default.
        device: `cpu` or `cuda`: decides the granule and what `memory_fraction` is of.

    Raises:
        PlanError: A number is out of range, or the budget holds less than one block of some group.
    """
    n = count("tokens_per_block", tokens_per_block)
    if n < 2 or n & (n - 1) or n > 2**20:
        raise PlanError(f"tokens_per_block must be a power of two of at least 2, got {n}; use {_nearest_power(n)}")
    longest = spec.max_seq_len if max_seq_len is None else count("max_seq_len", max_seq_len)
    typical = min(longest, 8192) if typical_seq_len is None else count("typical_seq_len", typical_seq_len)
    if typical > longest:
        raise PlanError(f"typical_seq_len {typical} is longer than max_seq_len {longest}")
    load = Load(
        typical,
        count("max_sequences", max_sequences),
        count("max_step_tokens", max_step_tokens),
        count("num_draft", num_draft, 0),
        count("checkpoint_interval", checkpoint_interval),
    )
    size, rank = count("tp_size", tp_size), count("tp_rank", tp_rank, 0)
    if rank >= size:
        raise PlanError(f"tp_rank {rank} must be below tp_size {size}")
    stage = _stage(spec, layers)
    codecs, codec_notes = resolve_codecs(codec, spec)
    grouped = group_pools(spec, codecs, stage, longest, size)
    if not grouped:
        raise PlanError(f"layers {stage.start}..{stage.stop - 1} store nothing; choose other layers")
    shape = _Shape(grouped, get_layout(layout), n, layer_first, GRANULES[device_type(device)])
    limits = _Limits(budget, memory_fraction, max_tokens, num_blocks, shares, max_budget, device)
    groups, total, ceiling, bound_by = _settle(shape, limits, load)
    plan = Plan(
        spec=spec,
        groups=tuple(groups),
        tokens_per_block=n,
        budget_bytes=total,
        max_budget_bytes=ceiling,
        bound_by=bound_by,
        granule_bytes=shape.granule,
        max_seq_len=longest,
        typical_seq_len=typical,
        max_sequences=load.max_sequences,
        max_step_tokens=load.max_step_tokens,
        num_draft=load.num_draft,
        checkpoint_interval=load.checkpoint_interval,
        device=device,
        tp_rank=rank,
        tp_size=size,
        layers=stage,
        tiers=_tiers(groups, load, host=host_budget, disk=disk_budget),
        notes=spec.notes + codec_notes,
    )
    plan.check()
    return replace(plan, notes=plan.notes + tuple(_remarks(plan, max_tokens)))


@dataclass(frozen=True, slots=True)
class _Shape:
    """What decides about the places inside a block, before anything is counted."""

    grouped: Grouped
    layout: Layout
    tokens_per_block: int
    layer_first: bool
    granule: int

    def place(self, reserved: Sequence[int]) -> list[GroupPlan]:
        """Return the groups with addresses for so many blocks each."""
        return [
            _group(self, name, lifetime, pools, blocks)
            for ((name, lifetime), pools), blocks in zip(self.grouped.items(), reserved, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Limits:
    """How much there may be, as the caller said it."""

    budget: int | str | None
    memory_fraction: float | None
    max_tokens: int | None
    num_blocks: int | Mapping[str, int] | None
    shares: Mapping[str, float] | None
    max_budget: int | str | None
    device: str


def _settle(shape: _Shape, limits: _Limits, load: Load) -> tuple[list[GroupPlan], int, int, str]:
    """Count the blocks of every group.

    Returns:
        (groups, budget in bytes, the most it may grow to, which limit bound it).
    """
    groups = shape.place([1] * len(shape.grouped))
    limit, bound_by = _limit(limits)
    wanted, wanted_by = _wanted(groups, limits.max_tokens, limits.num_blocks, load)
    needed = sum(g.committed_bytes(b, shape.granule) for g, b in zip(groups, wanted, strict=False))
    total = needed if limit is None else limit
    if wanted and needed <= total:
        bound_by = wanted_by
    elif limits.num_blocks is not None:
        raise PlanError(
            f"num_blocks {wanted} take {needed} bytes, above the budget of {limit}; lower one or raise the other"
        )
    ceiling = total if limits.max_budget is None else parse_bytes(limits.max_budget, "max_budget")
    if ceiling < total:
        raise PlanError(f"max_budget {ceiling} is below the budget of {total}; raise it or leave it out")
    least = sum(g.committed_bytes(1, shape.granule) for g in groups)
    if total < least:
        sizes = ", ".join(f"{g.name} {g.bytes_per_block}" for g in groups)
        raise PlanError(
            f"a budget of {total} bytes holds not even one block of every group (bytes a block: {sizes}); give at least"
            f" {least} bytes, or fewer tokens_per_block than {shape.tokens_per_block}"
        )
    within = [sizing.blocks_within(g, ceiling, shape.granule) for g in groups]
    if bound_by == wanted_by:
        groups = shape.place([max(a, b) for a, b in zip(within, wanted, strict=True)])
        return [replace(g, num_blocks=b) for g, b in zip(groups, wanted, strict=True)], total, ceiling, bound_by
    groups = shape.place(within)
    if limits.shares is not None:
        blocks = sizing.share_by_fraction(groups, total, limits.shares, shape.granule)
    else:
        blocks = sizing.share_by_need(groups, total, load)
    return sizing.fit(groups, blocks, total, shape.granule), total, ceiling, bound_by


def _nearest_power(n: int) -> str:
    below = 1 << (max(n, 2).bit_length() - 1)
    return f"{below} or {below * 2}" if 2 <= n <= 2**20 else "16, 32 or 64"


def _stage(spec: CacheSpec, layers: range | None) -> range:
    """Check the layers of a pipeline stage: what a layer shares must lie in its own stage."""
    if layers is None:
        return range(spec.num_layers)
    if not isinstance(layers, range) or layers.step != 1 or not 0 <= layers.start < layers.stop <= spec.num_layers:
        raise PlanError(f"layers must be a range within range(0, {spec.num_layers}), got {layers!r}")
    for index in layers:
        for kind in spec.layers[index].kinds:
            if isinstance(kind, SharedKind) and kind.source_layer not in layers:
                raise PlanError(
                    f"layer {index} reads the cache of layer {kind.source_layer}, which is outside {layers!r};"
                    f" cut the stages so that both are in one"
                )
    return layers


def _group(
    shape: _Shape, name: str, lifetime: Lifetime | None, pools: list[tuple[Pool, tuple[int, ...]]], reserved: int
) -> GroupPlan:
    """Place one group; a state group holds one state a block and is layer-first."""
    first = shape.layer_first or lifetime is None
    tokens = 1 if lifetime is None else shape.tokens_per_block
    at = place(pools, shape.layout, tokens, reserved, first, shape.granule)
    covered = tuple(sorted({layer for _, layers in pools for layer in layers}))
    group = GroupPlan(
        name=name,
        lifetime=lifetime,
        layers=covered,
        num_blocks=0,
        num_blocks_reserved=reserved,
        tokens_per_block=tokens,
        bytes_per_block=at.bytes_per_block,
        payload_bytes_per_block=at.payload_bytes_per_block,
        pools=at.pools,
        ranges=at.ranges,
        layer_first=first,
        layer_pitch_bytes=at.ranges[0].pitch_bytes if first else 0,
    )
    if group.slab_bytes > MAX_BYTES:
        raise PlanError(f"group {name!r} would need {group.slab_bytes} bytes of addresses, above {MAX_BYTES}")
    return group


def _limit(given: _Limits) -> tuple[int | None, str]:
    """Return the least of the byte limits and its name; None when there is none and none is needed."""
    limits: dict[str, int] = {}
    fraction = given.memory_fraction
    if given.budget is not None:
        limits["budget"] = parse_bytes(given.budget)
        if limits["budget"] == 0:
            raise PlanError("budget must be positive, got 0")
    elif fraction is None and given.max_tokens is None and given.num_blocks is None:
        fraction = DEFAULT_FRACTION[device_type(given.device)]
    if fraction is not None:
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise PlanError(f"memory_fraction must be a number in (0, 1], got {fraction!r}")
        limits["memory_fraction"] = int(free_bytes(given.device) * Fraction(fraction))
    name = min(limits, key=limits.__getitem__, default="")
    return limits.get(name), name


def _wanted(
    groups: Sequence[GroupPlan], max_tokens: int | None, num_blocks: int | Mapping[str, int] | None, load: Load
) -> tuple[list[int], str]:
    """Return the blocks asked for by count and which argument asked; an empty list when none did."""
    if num_blocks is not None:
        if max_tokens is not None:
            raise PlanError("give max_tokens or num_blocks, not both")
        if isinstance(num_blocks, Mapping):
            named = sizing.expand_names(groups, num_blocks, "num_blocks")
            blocks = [count(f"num_blocks[{g.name!r}]", named[g.name]) for g in groups]
        else:
            blocks = [count("num_blocks", num_blocks)] * len(groups)
        return _ids(groups, blocks), "num_blocks"
    if max_tokens is None:
        return [], "none"
    lengths = sizing.as_lengths(count("max_tokens", max_tokens), sizing.unit_length(groups, load))
    return _ids(groups, [sizing.planned_blocks(g, lengths, load) for g in groups]), "max_tokens"


def _ids(groups: Sequence[GroupPlan], blocks: list[int]) -> list[int]:
    """Check that every block has an id: tables hold int32."""
    for group, number in zip(groups, blocks, strict=True):
        if number > sizing.MAX_BLOCKS:
            raise PlanError(
                f"group {group.name!r} would need {number} blocks; block ids go up to {sizing.MAX_BLOCKS - 1}"
            )
    return blocks


def _tiers(groups: Sequence[GroupPlan], load: Load, **budgets: int | str) -> tuple[TierPlan, ...]:
    """Split the budget of every tier that has one by need; a tier has no granules."""
    tiers = []
    for name, given in budgets.items():
        budget = parse_bytes(given, f"{name}_budget")
        if budget:
            blocks = sizing.share_by_need(groups, budget, load)
            tiers.append(TierPlan(name, budget, tuple(min(b, sizing.MAX_BLOCKS) for b in blocks)))
    return tuple(tiers)


def _remarks(plan: Plan, max_tokens: int | None) -> list[str]:
    """Say what was rounded and what does not fit."""
    notes = []
    folded = [
        index
        for index in plan.layers
        if plan.max_seq_len <= (plan.spec.layers[index].lifetime.window or plan.spec.layers[index].lifetime.chunk or 0)
    ]
    if folded:
        notes.append(
            f"{len(folded)} layers have a window or chunk not shorter than max_seq_len {plan.max_seq_len}: they keep"
            f" everything, as full layers do"
        )
    if plan.max_seq_len > plan.spec.max_seq_len:
        notes.append(f"max_seq_len {plan.max_seq_len} is above the {plan.spec.max_seq_len} that the model was made for")
    if plan.bound_by == "max_tokens" and max_tokens != plan.num_tokens:
        notes.append(f"max_tokens {max_tokens} was rounded up to whole blocks: {plan.num_tokens} tokens")
    notes += [
        f"group {group.name} ends at {sizing.MAX_BLOCKS} blocks, the last id of a table, whatever the budget"
        for group in plan.groups
        if group.num_blocks == sizing.MAX_BLOCKS
    ]
    longest = plan.longest_sequence()
    if longest.value < plan.max_seq_len:
        need = [sizing.live_blocks(g, {plan.max_seq_len: 1}, plan.load) for g in plan.groups]
        cost = sum(g.committed_bytes(b, plan.granule_bytes) for g, b in zip(plan.groups, need, strict=True))
        notes.append(
            f"a sequence of max_seq_len {plan.max_seq_len} tokens does not fit: the longest is {longest.value} tokens,"
            f" limited by group {longest.limited_by}; one of {plan.max_seq_len} needs {cost} bytes"
            f" ({format_bytes(cost)}): raise the budget, lower max_seq_len, or choose a smaller codec"
        )
    for group in plan.groups:
        together = group.num_blocks // (2 + plan.num_draft)
        if group.is_state and together < plan.max_sequences:
            notes.append(
                f"max_sequences is {plan.max_sequences}, but group {group.name} holds {group.num_blocks} states:"
                f" {together} sequences can be in one step (each needs {2 + plan.num_draft}); raise the budget or this"
                f" group's share"
            )
    return notes
