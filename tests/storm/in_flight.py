"""Two steps in flight: the second is opened before anybody knows what the first samples, and either may fail."""

from __future__ import annotations

import torch

import kvpool as kv

from .model import forward
from .operations import VOCABULARY, operation, refused
from .world import Live, Storm, split


@operation(12, "KVCache.resolve")
def serve_two(storm: Storm) -> str | None:
    """A step, and another that computes its samples, opened while it is open."""
    rng = storm.rng
    ready = [live for live in storm.live if live.computed < len(live.tokens) <= storm.longest - 2]
    if not ready:
        return None
    items = [(live, rng.choice([3, 1000])) for live in split(rng, ready, 4)]
    before = storm.cache.stats()
    try:
        one = storm.cache.step([(live.seq, most) for live, most in items])
    except kv.OutOfBlocks as error:
        return refused(storm, items, before, error)
    rows = storm.check_step(one, items)
    if rows:
        forward(storm, one, rows)
    sampled = [rows[row][0] for row in one.sample_seqs.tolist()]
    ids = [rng.randrange(VOCABULARY) for _ in sampled]
    storm.cache.extend(one, None)
    told = f"{[(live.seq.id, first, count) for live, first, count in rows]}"
    others = [live for live in ready if live not in [live for live, _ in items]][:1]
    later = [(live, 1) for live in sampled] + [(live, 7) for live in others]
    two = _open(storm, later)
    if rng.random() < 0.1:
        one.close(failed=True)
        storm.must(two is None or not two.open, "a step outlived the failed one before it")
        return f"{told} failed on purpose, the next with it"
    one.next_ids = torch.tensor(ids)
    storm.ended(rows, True)
    for live, token in zip(sampled, ids, strict=True):
        live.tokens.append(token)
        live.extend_links()
    late = two is not None and rng.random() < 0.5
    if not late:
        _end(storm, one, ids)
    if two is not None:
        two.start()
        rows = storm.check_step(two, later)
        forward(storm, two, rows)
        if late:
            _end(storm, one, ids)
        if rng.random() < 0.1:
            two.close(failed=True)
            return f"{told}, the next failed on purpose"
        two.close()
        storm.ended(rows, True)
        told = f"{told}, then {[(live.seq.id, first, count) for live, first, count in rows]}"
    for live in sampled:
        storm.must(live.seq.tokens == live.tokens, f"{live.seq} has other tokens than were sampled")
    return told


def _open(storm: Storm, items: list[tuple[Live, int]]) -> kv.Step | None:
    try:
        step = storm.cache.step([(live.seq, most) for live, most in items], start=False)
    except kv.OutOfBlocks:
        return None
    if not step.sequences:  # they wait for a tier, or there are none
        step.close(failed=True)
        return None
    return step


def _end(storm: Storm, step: kv.Step, ids: list[int]) -> None:
    storm.cache.resolve(step, ids)
    step.close()
