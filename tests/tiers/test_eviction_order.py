from __future__ import annotations

import dataclasses
import random

from kvpool.tiers.base import BlockId, Entry
from kvpool.tiers.eviction_order import EvictionOrder

from . import blocks


def drain(order: EvictionOrder) -> list[BlockId]:
    out = []
    while (block := order.victim(lambda _: True)) is not None:
        order.remove(block)
        order.check()
        out.append(block)
    assert len(order) == 0
    return out


def test_chains_go_whole_from_their_leaf_the_oldest_first() -> None:
    order = EvictionOrder()
    first, second, third = (blocks.chain(s, 5) for s in range(3))
    for entries in (first, second, third):
        for entry in entries:
            order.add(entry)
    for entry in reversed(first):
        order.touch(entry.id)
    assert drain(order) == [e.id for entries in (second, third, first) for e in reversed(entries)]


def test_a_block_waits_for_its_children_whatever_its_own_priority() -> None:
    order = EvictionOrder()
    chain = blocks.chain(1, 4)
    other = blocks.chain(2, 2)
    for entry in chain[:3]:
        order.add(entry)
    for entry in other:
        order.add(entry)
    order.add(dataclasses.replace(chain[3], priority=80))
    assert drain(order) == [other[1].id, other[0].id, chain[3].id, chain[2].id, chain[1].id, chain[0].id]


def test_a_higher_priority_lifts_and_a_lower_one_does_not_sink() -> None:
    order = EvictionOrder()
    first, second, third = (blocks.chain(s, 1)[0] for s in range(3))
    for entry in (first, second, third):
        order.add(entry)
    order.touch(first.id, 60)
    order.touch(first.id, 10)
    order.touch(second.id)
    assert drain(order) == [third.id, second.id, first.id]


def test_children_may_come_before_their_parents() -> None:
    order = EvictionOrder()
    chain = blocks.chain(1, 4, priority=60)
    order.add(chain[3])
    for entry in (chain[2], chain[1], chain[0]):
        order.add(dataclasses.replace(entry, priority=10))
    order.check()
    assert drain(order) == [e.id for e in reversed(chain)]


def test_what_is_in_use_stays() -> None:
    order = EvictionOrder()
    chain = blocks.chain(1, 3)
    for entry in chain:
        order.add(entry)
    assert order.victim(lambda block: block != chain[2].id) is None
    assert order.victim(lambda block: True) == chain[2].id


def test_a_long_prefix_under_a_busy_child_costs_little() -> None:
    order = EvictionOrder()
    prefix = blocks.chain(1, 3000)
    for entry in prefix:
        order.add(entry)
    calls = [0]

    def free(block: BlockId) -> bool:
        calls[0] += 1
        return True

    for seed in range(10, 1000):
        entry = dataclasses.replace(blocks.chain(seed, 1)[0], parent=prefix[-1].key, position=prefix[-1].position + 4)
        order.add(entry)
        block = order.victim(free)
        assert block is not None
        order.remove(block)
    assert calls[0] < 2000
    order.check()


def test_random_operations_keep_the_invariants_and_never_give_up_a_parent() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    order = EvictionOrder()
    everything = [
        dataclasses.replace(entry, priority=rng.choice([0, 35, 35, 80]))
        for s in range(20)
        for entry in blocks.chain(s, 6, group=s % 2)
    ]
    held: dict[BlockId, Entry] = {}
    for _ in range(3000):
        entry = rng.choice(everything)
        choice = rng.random()
        if choice < 0.5:
            order.add(entry)
            held[entry.id] = entry
        elif choice < 0.7:
            order.touch(entry.id, rng.choice([0, 35, 90]))
        elif choice < 0.8 and entry.id in held:
            order.remove(entry.id)
            del held[entry.id]
        else:
            pinned = set(rng.sample(sorted(held), len(held) // 4))
            block = order.victim(lambda b, pinned=pinned: b not in pinned)
            if block is not None:
                assert block not in pinned
                assert not any(e.parent_id == block for e in held.values() if e.parent)
                order.remove(block)
                del held[block]
        order.check()
        assert set(order) == set(held)
