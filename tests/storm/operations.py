"""What can be done to a cache, each at random. An operation returns what it did, or None if it could not be done.

To add one: write a function, say how often (`weight`) and which public methods it exercises. `test_storm` fails for
a public method of the cache that no operation exercises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import kvpool as kv
from kvpool.kinds import IndexerKind

from . import content
from .model import forward
from .world import Live, Storm, attends, split

VOCABULARY = 5  # Few tokens, so that prefixes meet by chance too.


@dataclass(frozen=True)
class Operation:
    """A function of the storm, how often it comes, and the public methods it exercises."""

    run: Callable[[Storm], str | None]
    weight: int
    covers: tuple[str, ...]


OPERATIONS: dict[str, Operation] = {}


def operation(weight: int, *covers: str) -> Callable[[Callable[[Storm], str | None]], Callable[[Storm], str | None]]:
    """Register an operation under its function's name."""

    def add(function: Callable[[Storm], str | None]) -> Callable[[Storm], str | None]:
        OPERATIONS[function.__name__] = Operation(function, weight, covers)
        return function

    return add


class Planned(Exception):
    """The failure a step is made to have."""


@operation(10, "KVCache.sequence", "Sequence.tokens")
def open_prompt(storm: Storm) -> str | None:
    """A new prompt: fresh, or a cut of an old one with something else behind it; now and then a tenant's own."""
    rng = storm.rng
    if len(storm.live) >= 8:
        return None
    extras = (rng.choice([None, None, None, "tenant"]), rng.choice([None, None, None, 7]))
    tokens: list[int] = []
    known = [*storm.past, *((live.extras, live.tokens) for live in storm.live)]
    if known and rng.random() < 0.8:
        old, tokens = rng.choice(known)
        extras = old if rng.random() < 0.8 else extras
        tokens = tokens[: rng.choice([len(tokens), rng.randint(0, len(tokens))])]
    tokens = tokens + [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, rng.randint(1, 40)]))]
    tokens = tokens[: storm.longest]
    limit = rng.choice([None, None, None, rng.randint(0, len(tokens))])
    try:
        seq = storm.cache.sequence(tokens, salt=extras[0], lora_id=extras[1], max_cached_tokens=limit)
    except kv.OutOfBlocks:
        return too_long(storm, len(tokens))
    storm.must(list(seq.tokens) == tokens, "tokens of a new sequence")
    storm.live.append(Live(seq, tokens, extras, limit))
    return f"{seq} {len(tokens)} tokens, {extras}"


def too_long(storm: Storm, num_tokens: int) -> str:
    """A prompt may be refused only where a resize took the memory for it."""
    done = storm.cache.resized
    storm.must(done is not None and done.budget_bytes < storm.plan.budget_bytes, f"{num_tokens} tokens were refused")
    return f"{num_tokens} tokens are too long for {done}"


@operation(
    40,
    "KVCache.step",
    "KVCache.write",
    "KVCache.attend",
    "KVCache.extend",
    "KVCache.fits",
    "KVCache.gather",
    "KVCache.score",
    "KVCache.state",
    "KVCache.state_read",
    "KVCache.state_write",
    "Sequence.num_cached_tokens",
)
def serve(storm: Storm) -> str | None:
    """A step for some sequences: prefill, chunked prefill and decode mixed; sometimes it fails halfway."""
    rng = storm.rng
    ready = [live for live in storm.live if live.computed < len(live.tokens) <= storm.longest]
    if not ready:
        return None
    items = [(live, rng.choice([1, 3, 16, 1000])) for live in split(rng, ready, 6)]
    commit, fail = rng.random() < 0.9, rng.random() < 0.1
    before = storm.cache.stats()
    fits = storm.cache.fits([(live.seq, most) for live, most in items])
    try:
        step = storm.cache.step([(live.seq, most) for live, most in items], commit=commit)
    except kv.OutOfBlocks as error:
        storm.must(fits < len(items), f"fits said {fits} items, the step was refused")
        told = refused(storm, items, before, error)
        return f"{told}, then {release(storm)}" if rng.random() < 0.5 else told
    took = len(step.sequences)
    # With tiers below, a sequence drops out while its blocks come, or is computed where they do not fit beside others.
    tiers = bool(storm.case.disk or storm.case.host_blocks)
    storm.must(fits == took or tiers, f"fits said {fits} items, the step took {took}")
    try:
        with step:
            rows = storm.check_step(step, items)
            forward(storm, step, rows)
            if fail:
                raise Planned
    except Planned:
        return f"{[live.seq.id for live, _ in items]} failed on purpose"
    storm.ended(rows, commit)
    sampled = [rows[row][0] for row in step.sample_seqs.tolist()]
    ids = [rng.randrange(VOCABULARY) for _ in sampled]
    storm.cache.extend(step, ids)
    for live, token in zip(sampled, ids, strict=True):
        live.tokens.append(token)
        live.extend_links()
    return f"{[(live.seq.id, first, count) for live, first, count in rows]}{'' if commit else ' uncommitted'}"


def refused(storm: Storm, items: list[tuple[Live, int]], before: object, error: kv.OutOfBlocks) -> str:
    """A refusal must be honest, name who did not fit, and leave everything as it was."""
    after = storm.cache.stats()
    # A refusal may come after memory has moved, from other groups or into the rest of a page: what is in use is as it
    # was, and with one group what is cached too.
    for name in ("used", "cached")[: 2 if len(storm.plan.groups) == 1 else 1]:
        storm.must(getattr(before, name) == getattr(after, name), f"a refused step changed {name}")
    ids = [live.seq.id for live, _ in items]
    storm.must(bool(error.sequences) and set(error.sequences) <= set(ids), f"{error.sequences} did not fit, of {ids}")
    if all(group.lifetime is not None and group.name == "full" for group in storm.plan.groups):
        n = storm.case.tokens_per_block
        # A match may take more cached blocks than the step computes tokens; one more block each for a copy.
        ends = [
            min(len(live.tokens), live.computed + most) if live.admitted else len(live.tokens) for live, most in items
        ]
        need = sum(-(-end // n) - -(-live.computed // n) + 1 for end, (live, _) in zip(ends, items, strict=True))
        storm.must(need > after.free + after.cached, f"refused, though {need} blocks are enough: {error}")
    return f"{ids} refused"


@operation(1)
def ask_too_much(storm: Storm) -> str | None:
    """A prompt that can never fit is refused at once, with the numbers, and changes nothing."""
    before = storm.cache.stats()
    full = [g for g in storm.plan.groups if g.lifetime is not None and g.lifetime.window is g.lifetime.chunk is None]
    if not full:
        return None
    tokens = [1] * (full[0].num_blocks_reserved * full[0].tokens_per_block + 1)
    with pytest.raises(kv.KVError, match=rf"{len(tokens)}"):
        storm.cache.sequence(tokens)
    storm.must(storm.cache.stats() == before, "a refused prompt changed the counters")
    return f"{len(tokens)} tokens"


@operation(6, "Sequence.extend", "Sequence.num_computed_tokens")
def append_known(storm: Storm) -> str | None:
    """Tokens the caller knows: the next turn of a conversation."""
    if not storm.live:
        return None
    live = storm.rng.choice(storm.live)
    if len(live.tokens) + 9 > storm.longest:
        return None
    storm.must(live.seq.num_computed_tokens == live.computed, f"{live.seq.num_computed_tokens} tokens are computed")
    tokens = [storm.rng.randrange(VOCABULARY) for _ in range(storm.rng.randint(1, 9))]
    try:
        live.seq.extend(tokens)
    except kv.OutOfBlocks:
        return too_long(storm, len(live.tokens) + len(tokens))
    live.tokens += tokens
    live.extend_links()
    return f"{live.seq} +{len(tokens)}"


@operation(6, "Sequence.rewind")
def rewind(storm: Storm) -> str | None:
    """Forget the last tokens, over block borders too, also into what was matched."""
    able = [live for live in storm.live if live.admitted and len(live.tokens) > 1]
    if not able:
        return None
    live = storm.rng.choice(able)
    count = storm.rng.choice([1, storm.rng.randint(1, len(live.tokens) - 1)])
    try:
        live.seq.rewind(count)
    except kv.UnsupportedError:  # a window or state needed there is gone: nothing may have changed
        storm.must(list(live.seq.tokens) == live.tokens, "tokens after a refused rewind")
        storm.must(live.seq.num_computed_tokens == live.computed, "computed tokens after a refused rewind")
        return f"{live.seq} -{count} refused"
    del live.tokens[len(live.tokens) - count :]
    del live.links[len(live.tokens) :]
    live.computed = min(live.computed, len(live.tokens))
    storm.must(list(live.seq.tokens) == live.tokens, "tokens after a rewind")
    return f"{live.seq} -{count}"


@operation(5, "Sequence.fork")
def fork(storm: Storm) -> str | None:
    """A second sequence over the same blocks; both go on, each its own way."""
    able = [live for live in storm.live if live.admitted]
    if not able or len(storm.live) >= 8:
        return None
    live = storm.rng.choice(able)
    twin = Live(live.seq.fork(), list(live.tokens), live.extras, live.limit, list(live.links), live.computed, True)
    storm.live.append(twin)
    return f"{live.seq} -> {twin.seq}"


@operation(4, "Sequence.pause", "Sequence.resume")
def pause(storm: Storm) -> str | None:
    """Hold nothing for a while; what is found again after resuming may be shorter, never other tokens."""
    able = [live for live in storm.live if live.admitted]
    if not able:
        return None
    live = storm.rng.choice(able)
    live.seq.pause()
    live.seq.resume()
    storm.committed |= set(live.links[: live.computed])
    live.computed, live.admitted, live.resumed = 0, False, True
    return f"{live.seq}"


@operation(1, "KVCache.below", "KVCache.flush", "KVCache.tier_stats")
def flush(storm: Storm) -> str | None:
    """An idle moment: everything stored goes to disk."""
    if not (storm.case.host_blocks or storm.case.disk):
        return None
    storm.must(storm.cache.flush(), "not everything came to disk")
    return f"{ {name: stats.num_blocks for name, stats in storm.cache.tier_stats().items()} }"


@operation(2, "KVCache.resize", "KVCache.resized")
def resize(storm: Storm) -> str | None:
    """Less memory, or all of it again; sequences and addresses stay."""
    budget = int(storm.plan.budget_bytes * storm.rng.choice([0.6, 0.8, 1.0, 1.0]))
    before = [(slab.address, slab.memory.reserved_bytes) for slab in storm.cache.pools.slabs]
    done = storm.cache.resize(budget)
    storm.must(done.committed_bytes <= done.budget_bytes, f"{done}")
    storm.must(done == storm.cache.resized, f"{done}, and then {storm.cache.resized}")
    storm.must(done.budget_bytes == budget or shrunk_to_use(storm), f"{done}, though there are blocks to give up")
    after = [(slab.address, slab.memory.reserved_bytes) for slab in storm.cache.pools.slabs]
    storm.must(before == after, "an address changed")
    return f"{budget} -> {done.num_blocks}"


def shrunk_to_use(storm: Storm) -> bool:
    """True when nothing is left to give up: every block is in use."""
    return any(group.free + group.cached == 0 for group in storm.cache.stats().groups)


@operation(8, "Sequence.release")
def release(storm: Storm) -> str | None:
    """Let go, keeping what is computed matchable or not; sometimes twice."""
    if not storm.live:
        return None
    live = storm.live.pop(storm.rng.randrange(len(storm.live)))
    keep = storm.rng.random() < 0.8
    live.seq.release(keep=keep)
    if keep:
        storm.committed |= set(live.links[: live.computed])
    storm.past = [*storm.past[-20:], (live.extras, live.tokens)]
    if storm.rng.random() < 0.2:
        live.seq.release(keep=keep)
    return f"{live.seq} keep={keep}"


@operation(3)
def pass_time(storm: Storm) -> str | None:
    """The clock moves; durations of retention run out."""
    storm.now += storm.rng.choice([0.1, 5.0])
    return f"now {storm.now:.1f}"


@operation(4, "KVCache.view")
def look_through_views(storm: Storm) -> str | None:
    """What another library's kernel sees: the pool itself, strided, some heads of it; block ids as in the table."""
    able = [live for live in storm.live if live.computed]
    layers = [layer for layer, spec in enumerate(storm.spec.layers) if attends(spec)]
    if not able or not layers:
        return None
    live, layer = storm.rng.choice(able), storm.rng.choice(layers)
    (key, *_), _, _ = storm.parts(layer)
    if key.codec.quantised:
        return None
    first = storm.rng.randrange(key.num_heads)
    view = storm.cache.view(layer, key.name, heads=slice(first, None))
    table, length = storm.cache.ledger.table(live.seq.id, key.group)
    token = torch.arange(length)
    block = torch.tensor(table)[token // key.tokens_per_block]
    seen = storm.visible(torch.tensor([length]), length, storm.lifetime(key))[0]
    axes = "BFHNC" if view.layout == "HND" else "BFNHC"
    data = view.data.permute([axes.index(axis) for axis in "BFNHC"])
    got = data[block.clamp(min=0), 0, token % key.tokens_per_block].float()  # [n, heads, C]
    want = storm.stored(key, live.links[:length])[:, first:]
    storm.must(bool((got == want).flatten(1).all(1)[seen].all()), f"layer {layer}: a view does not show {key.name}")
    return f"{live.seq} layer {layer} heads {first}.."


@operation(1, "KVCache.lost")
def count_losses(storm: Storm) -> str | None:
    """What constant scales lost only grows, and nothing that is not finite was ever written."""
    lost = storm.cache.lost()
    before, storm.lost = storm.lost, {key: (counts.saturated, counts.flushed) for key, counts in lost.items()}
    for key, counts in lost.items():
        grown = all(new >= old for new, old in zip(storm.lost[key], before.get(key, (0, 0)), strict=True))
        storm.must(grown and counts.nonfinite == 0, f"{key} lost {counts}, before {before.get(key)}")
    return f"{storm.lost}" if lost else None


@operation(3, "KVCache.peek", "KVCache.pin", "KVCache.unpin")
def pin_and_press(storm: Storm) -> str | None:
    """A pinned prefix is still found whole after others pressed; looking changes nothing."""
    if not storm.past:
        return None
    (salt, lora_id), tokens = storm.rng.choice(storm.past)
    before = storm.cache.stats()
    found = storm.cache.peek(tokens, salt=salt, lora_id=lora_id)
    storm.must(found == storm.cache.peek(tokens, salt=salt, lora_id=lora_id), "peek is not steady")
    storm.must(storm.cache.stats() == before, "peek changed the counters")
    live = Live(None, list(tokens), (salt, lora_id))  # type: ignore[arg-type]
    storm.must(found <= storm.most_cached(live), f"peek found {found}, {storm.most_cached(live)} were ever matchable")
    pin = storm.cache.pin(tokens, salt=salt, lora_id=lora_id)
    pinned = found // storm.case.tokens_per_block * storm.case.tokens_per_block
    for _ in range(3):
        serve(storm)
    after = storm.cache.peek(tokens, salt=salt, lora_id=lora_id)
    full = all(group.name == "full" for group in storm.plan.groups)
    storm.must(not full or after >= pinned, f"{pinned} tokens were pinned, {after} are found")
    storm.cache.unpin(pin)
    return f"{found} of {len(tokens)} tokens"


@operation(1, "KVCache.clear")
def clear(storm: Storm) -> str | None:
    """Everything stored is forgotten, or one tenant's; sequences go on."""
    salt = storm.rng.choice([None, "tenant"])
    storm.cache.clear(salt)
    forgotten = [entry for entry in storm.past if salt is None or entry[0][0] == salt]
    held = {link for live in storm.live for link in live.links}
    for extras, tokens in forgotten:
        live = Live(None, list(tokens), extras)  # type: ignore[arg-type]
        if held.isdisjoint(live.links):
            found = storm.cache.peek(tokens, salt=extras[0], lora_id=extras[1])
            storm.must(found == 0, f"{found} tokens of {extras} are found after clear({salt!r})")
    return f"{salt}"


@operation(1, "KVCache.reset")
def reset(storm: Storm) -> str | None:
    """Everything is let go and every block is free; only a cache without tiers can."""
    if storm.rng.random() < 0.7:  # seldom: what lives is what the storm is about
        return None
    if storm.case.host_blocks or storm.case.disk:
        if not storm.live:
            return None
        with pytest.raises(kv.PlanError, match="tiers"):
            storm.cache.reset()
        return "refused"
    storm.cache.reset()
    storm.live.clear()
    storm.committed.clear()
    stats = storm.cache.stats()
    storm.must(stats.free == stats.committed, f"{stats.free} of {stats.committed} blocks are free after a reset")
    storm.lost = {}
    return "all"


@operation(2, "KVCache.events")
def drain_events(storm: Storm) -> str | None:
    """Events come once, in order."""
    numbers = [event.number for event in storm.cache.events()]
    storm.must(numbers == sorted(set(numbers)), "events are out of order")
    return f"{len(numbers)}"


@operation(4, "KVCache.take", "KVCache.take_index")
def take_slots(storm: Storm) -> str | None:
    """Any slots in any order, some of them none."""
    able = [live for live in storm.live if live.computed]
    layers = [layer for layer, spec in enumerate(storm.spec.layers) if attends(spec)]
    if not able or not layers:
        return None
    live, layer = storm.rng.choice(able), storm.rng.choice(layers)
    (key, *_), _, _ = storm.parts(layer)
    table, length = storm.cache.ledger.table(live.seq.id, key.group)
    seen = storm.visible(torch.tensor([length]), length, storm.lifetime(key))[0].nonzero().flatten().tolist()
    if not seen:
        return None
    places = [storm.rng.choice(seen) for _ in range(5)]
    n = key.tokens_per_block
    slots = torch.tensor([table[p // n] * n + p % n for p in places] + [-1])
    first = storm.cache.take(layer, slots)[0]
    want = storm.stored(key, [live.links[p] for p in places])[..., : first.shape[-1]]
    storm.must(torch.equal(first[:-1], want), f"layer {layer}: slots do not hold {key.name}")
    storm.must(not first[-1].any(), "slot -1 does not give zeros")
    if any(isinstance(kind, IndexerKind) for kind in storm.spec.layers[layer].kinds):
        part = storm.cache.pools.part(layer, "index")
        got = storm.cache.take_index(layer, slots)
        storm.must(torch.equal(got[:-1], storm.stored(part, [live.links[p] for p in places])), "indexer keys")
    return f"{live.seq} {places}"


@operation(5, "KVCache.accept")
def speculate(storm: Storm) -> str | None:
    """Two branches of drafts behind the last token; one path of them, or none, becomes the sequence."""
    rng = storm.rng
    able = [live for live in storm.live if live.admitted and live.computed == len(live.tokens) - 1]
    if not storm.plan.num_draft or not able:
        return None
    live = rng.choice(able)
    if len(live.tokens) + 5 > storm.longest:
        return None
    drafts, parents = [rng.randrange(VOCABULARY) for _ in range(4)], [-1, 0, 0, 2]
    try:
        step = storm.cache.step([(live.seq, 1)], drafts={live.seq: (drafts, parents)})
    except kv.OutOfBlocks:
        return f"{live.seq} had no room"
    links = list(live.links)
    for token, parent in zip(drafts, parents, strict=True):
        branch = [links[live.computed if parent < 0 else live.computed + 1 + parent]]
        content.extend(branch, 0, [token])
        links.append(branch[-1])
    with step:
        for layer, spec in enumerate(storm.spec.layers):
            names = {part for kind in spec.kinds for part in storm.part_names(kind)}
            given = {name: storm.given(layer, name, links[live.computed :]) for name in names}
            if given:
                storm.cache.write(layer, step, **given)
    live.computed += 1
    chosen = rng.choice([[], [0], [0, 1], [0, 2, 3]])
    storm.cache.accept(live.seq, chosen)
    live.tokens += [drafts[i] for i in chosen]
    live.extend_links()
    live.computed += len(chosen)
    storm.committed |= set(live.links[: live.computed])
    storm.must(list(live.seq.tokens) == live.tokens, "tokens after accept")
    return f"{live.seq} keeps {chosen}"
