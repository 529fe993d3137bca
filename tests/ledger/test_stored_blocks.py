"""What is stored stays what it was: rewinds, forks; what events and counters say of it."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.kinds import Lifetime
from kvpool.ledger import Event, Media, Released, Retention
from kvpool.ledger.policies import FIFO, CountLRU


def driver(blocks: int = 32, **options: object) -> Driver:
    return Driver(make_plan((FULL, blocks)), **options)


@pytest.mark.parametrize("shared", [True, False])
def test_writing_into_the_middle_of_a_stored_block_leaves_the_prefix_as_it_was(shared: bool) -> None:
    """Shared: it is copied. Nobody else's, and a leaf: it leaves the tree, and only what lies before it is found."""
    d = driver(events=64)
    a, _ = d.prefill(range(8))
    other = d.prefill([*range(8), 20])[0] if shared else None
    d.rewind(a, 2)
    d.extend(a, 50)
    d.extend(a, 51)
    d.ledger.events()
    step = d.step((a, 2))  # the driver checks what a and, later, others read
    removed = [e.start for e in d.ledger.events() if e.kind == "removed"]
    assert (len(step.copies), removed) == ((1, []) if shared else (0, [4]))
    assert d.ledger.peek([*range(8), 99]) == (8 if shared else 6)
    assert d.ledger.peek([*range(6), 50, 51, 99]) == 8
    if other is not None:
        d.generate(other, 21, 22)
    b, step = d.prefill([*range(8), 99])
    assert d.cached(step, b) == (8 if shared else 6)


def test_a_fork_point_keeps_the_state_that_a_later_match_needs() -> None:
    d = Driver(make_plan((FULL, 32), (None, 16), checkpoint_interval=1024))
    a, _ = d.prefill(range(5))
    d.generate(a, *range(5, 8))
    b = d.fork(a)  # at a block border
    for seq in (a, b):
        d.generate(seq, 100 + seq, 101, 102, 103, 104)
        d.ledger.release(seq, keep=False)
    assert d.ledger.peek([*range(8), 99]) == 8
    assert d.ledger.peek([*range(7), 99]) == 4


def test_what_generations_of_a_window_passed_is_found_at_the_end_of_a_sequence() -> None:
    d = Driver(make_plan((FULL, 128), (Lifetime(window=6), 64), checkpoint_interval=1024))
    a, _ = d.prefill(range(9))
    d.generate(a, *range(9, 23))
    d.ledger.release(a)
    for i in range(6):  # the window group is filled with others
        s, _ = d.prefill(range(100 * i + 100, 100 * i + 140))
        d.ledger.release(s)
    assert d.ledger.peek([*range(23), 99]) == 23


def test_counters_of_a_sequence_and_of_all_tell_partial_hits_apart() -> None:
    d = driver()
    a, _ = d.prefill(range(10))
    d.ledger.release(a)
    b, _ = d.prefill([*range(10), 99])
    stats, total = d.ledger.sequence_stats(b), d.ledger.stats()
    assert (stats.num_cached, stats.num_partial, stats.num_missed) == (10, 2, 1)
    assert (total.hit_tokens, total.partial_tokens, total.missed_tokens) == (10, 2, 11)
    assert (total.taken_blocks, total.copied_blocks, total.admitted) == (1, 0, 2)


def test_evictions_are_counted_by_priority() -> None:
    d = driver(4)
    for start, priority in ((0, 20), (100, 60)):
        a, _ = d.prefill(range(start, start + 8), retention=[Retention(0, None, priority)])
        d.ledger.release(a)
    d.prefill(range(200, 212))
    assert d.ledger.stats().evicted_by_priority == {20: 2, 60: 1}


def vllm_message(e: Event, tokens_per_block: int) -> dict[str, object]:
    """The fields of vLLM's BlockStored (v1/core, kv_events.py)."""
    return {
        "block_hashes": [e.key], "parent_block_hash": e.parent, "token_ids": list(e.token_ids),
        "block_size": tokens_per_block, "lora_name": e.lora_id or None, "medium": e.tier, "group_idx": e.group,
        "extra_keys": [(e.salt, *(m.key for m in e.media))],
    }  # fmt: skip


def tensorrt_message(e: Event, window: int) -> dict[str, object]:
    """The fields of TensorRT-LLM's `stored` event."""
    return {
        "event_id": e.number, "window_size": window, "parent_hash": e.parent, "block_hash": e.key,
        "tokens": list(e.token_ids), "priority": e.priority, "cache_level": e.tier, "cache_salt": e.salt,
        "mm_keys": [(m.key, e.start - m.start) for m in e.media], "lora_id": e.lora_id,
    }  # fmt: skip


def test_events_fill_the_messages_that_engines_publish() -> None:
    d = Driver(make_plan((FULL, 16), (Lifetime(window=8), 16)), events=64)
    a, _ = d.prefill(range(9), salt="tenant", lora_id=7, media=(Media(2, 4, "cat"),), retention=[Retention(0, 4, 80)])
    d.ledger.release(a)
    d.ledger.reset()
    events = d.ledger.events()  # read when the tree that knew salt and media is gone
    stored = [e for e in events if e.kind == "stored"]
    assert [(e.group, e.start) for e in stored] == [(0, 0), (1, 0), (0, 4), (1, 4), (0, 8), (1, 8)]
    assert vllm_message(stored[2], 4) == {
        "block_hashes": [stored[2].key], "parent_block_hash": stored[0].key, "token_ids": [4, 5, 6, 7],
        "block_size": 4, "lora_name": b"i7", "medium": "device", "group_idx": 0, "extra_keys": [(b"stenant", b"scat")],
    }  # fmt: skip
    assert tensorrt_message(stored[0], 0) == {
        "event_id": 0, "window_size": 0, "parent_hash": None, "block_hash": stored[0].key, "tokens": [0, 1, 2, 3],
        "priority": 80, "cache_level": "device", "cache_salt": b"stenant", "mm_keys": [(b"scat", -2)],
        "lora_id": b"i7",
    }  # fmt: skip
    assert stored[4].media == ()
    removed = [e for e in events if e.kind == "removed"]
    assert {(e.group, e.key) for e in removed} == {(e.group, e.key) for e in stored}
    assert {e.salt for e in removed} == {b"stenant"}
    assert [e.number for e in events] == list(range(len(events)))


def released(names: list[int], *, now: int, uses: list[int] | None = None, keys: list[float] | None = None) -> Released:
    n = len(names)
    return Released(
        0, np.arange(n, dtype=np.int32), np.array(uses or [0] * n, np.int32), np.zeros(n, np.int32),
        np.full(n, 35, np.int32), np.array(names, np.uint64), np.array(keys or [0.0] * n), now, 10, 16,
    )  # fmt: skip


def test_counts_are_remembered_beyond_eviction_but_not_for_ever() -> None:
    policy = CountLRU(history=2)
    assert policy.keys(released([1], now=1))[0] == 1.0
    assert policy.keys(released([1], now=2))[0] > 2.0  # found again, evicted in between or not
    policy.keys(released(list(range(100, 200)), now=3))
    assert len(policy._counts) == 20  # twice the blocks
    assert policy.keys(released([1], now=4))[0] == 4.0


def test_fifo_keeps_the_time_of_the_first_release() -> None:
    assert FIFO().keys(released([1, 2], now=9, uses=[0, 3], keys=[0.0, 4.0])).tolist() == [9.0, 4.0]
