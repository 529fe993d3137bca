"""Behaviours that TensorRT-LLM's KV cache manager pins in its tests (kvCacheManagerTest.cpp), with its numbers.

Blocks of 4 tokens unless said. Where ours decides differently the docstring says so.
"""

from __future__ import annotations

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import OutOfBlocks
from kvpool.kinds import Lifetime
from kvpool.ledger import Media, Retention


def driver(blocks: int, **options: object) -> Driver:
    return Driver(make_plan((FULL, blocks)), **options)


def test_partial_copy() -> None:
    """BlockManagerTestPartialCopy, 8 tokens a block: 17 tokens {0,1,2}; a 12-token request copies 3 tokens of block 1.

    Ours: the resent 17 tokens take block 3, the lowest free one, not 6; 12 tokens match 8 + 3.
    """
    d = Driver(make_plan((FULL, 8), n=8))
    a, _ = d.prefill(range(17))
    assert d.blocks(a) == [0, 1, 2]
    b, step = d.prefill(range(17))
    assert (d.cached(step, b), d.blocks(b)) == (16, [0, 1, 3])
    c, step = d.prefill(range(12))
    assert (d.cached(step, c), d.blocks(c)) == (11, [0, 4])
    assert [(x.src, x.dst, x.num_tokens) for x in step.copies] == [(1, 4, 3)]


def test_a_prompt_that_is_reused_by_chance() -> None:
    """BlockManagerReuseTest: 31 zeros share a token with [0..]; a 1-token prompt shares none.

    Ours: the same, as long as the block that begins with it is stored.
    """
    d = driver(16)
    a, _ = d.prefill(range(9))
    d.ledger.release(a)
    b, step = d.prefill([0] * 31)
    assert d.cached(step, b) == 1


def test_extra_ids_are_part_of_the_key() -> None:
    """BlockManagerReuseWithExtraIdTest: other extras, no reuse. Ours names media items with key and range."""
    d = driver(32)
    prompt = [100, 101, 102, 103, 104, 105, 0, 1, 2]
    cat, dog = (Media(0, 6, "cat"),), (Media(0, 6, "dog"),)
    a, _ = d.prefill(prompt, media=cat)
    d.ledger.release(a)
    b, step = d.prefill(prompt, media=cat)
    assert d.cached(step, b) == 8
    c, step = d.prefill(prompt, media=dog)
    assert d.cached(step, c) == 0
    e, step = d.prefill(prompt)
    assert d.cached(step, e) == 0


def test_lora_tasks_keep_apart() -> None:
    """BlockManagerReuseWithLoraTaskId: lora 0 {0,1,2}; lora 1 with the same tokens finds nothing; none is not 0."""
    d = driver(32)
    a, _ = d.prefill(range(9), lora_id=0)
    b, step = d.prefill(range(9), lora_id=1)
    assert (d.cached(step, b), d.blocks(b)) == (0, [3, 4, 5])
    c, step = d.prefill([*range(9), 9, 10], lora_id=1)
    assert d.cached(step, c) == 8
    e, step = d.prefill(range(5), lora_id=0)
    assert (d.cached(step, e), d.blocks(e)[0]) == (4, d.blocks(a)[0])
    f, step = d.prefill(range(9))
    assert d.cached(step, f) == 0


def test_statistics_of_a_request() -> None:
    """KVCacheManagerPerRequestStatsTest counts blocks (3 missed; then 2 reused, 1 missed). Ours counts tokens."""
    d = driver(16)
    a, _ = d.prefill(range(9))
    stats = d.ledger.sequence_stats(a)
    assert (stats.num_cached, stats.num_missed) == (0, 9)
    d.ledger.release(a)
    b, _ = d.prefill(range(9))
    stats = d.ledger.sequence_stats(b)
    assert (stats.num_cached, stats.num_missed) == (8, 1)
    assert (d.ledger.stats().hit_tokens, d.ledger.stats().missed_tokens) == (8, 10)


def test_block_priorities() -> None:
    """BlockManagerBlockPriorityTest, 4 blocks: block [4,8) of seq0 (10) goes, its first (90) stays."""
    d = driver(4)
    a, _ = d.prefill(range(8), retention=[Retention(0, 4, 90), Retention(4, 8, 10), Retention(8, None, 20)])
    d.ledger.release(a)
    b, _ = d.prefill(range(100, 108))
    d.ledger.release(b)
    c, _ = d.prefill(range(200, 208), retention=[Retention(0, None, 20)])  # evicts 4..7 of a, then 104..107 of b
    d.ledger.release(c)
    assert d.ledger.peek([*range(8), 8]) == 4
    assert d.ledger.peek(range(100, 109)) == 4
    assert d.ledger.peek(range(200, 209)) == 8
    assert d.ledger.stats().evicted_by_priority == {10: 1, 35: 1}


def test_decode_priorities() -> None:
    """KVCacheManagerDecodeBlockPriorityTest, 8 blocks: req0 context 5 / decode 90, req1 context 90 / decode 5.

    A new request of 3 blocks evicts 7, 3 and 2 there. Ours: a parent stands at least as high as its children, so what
    goes is the low leaf of req1 and then, as every other leaf is at 90, the least recently released of them.
    """
    d = driver(8)
    a, _ = d.prefill(range(8), retention=[Retention(0, 8, 5), Retention(8, None, 90)])
    d.generate(a, *range(8, 13))
    b, _ = d.prefill(range(100, 108), retention=[Retention(0, 8, 90), Retention(8, None, 5)])
    d.generate(b, *range(108, 113))
    d.ledger.release(a)
    d.ledger.release(b)
    assert d.ledger.stats().cached == 8
    d.prefill(range(200, 212))
    assert d.ledger.stats().evicted_by_priority[5] == 2
    assert d.ledger.peek(range(100, 113)) == 8


def test_a_priority_ends_with_its_duration() -> None:
    """KVCacheManagerTimedEvictionTest: 80 for 10 ms against 50; after 50 ms the first one goes."""
    time = [0.0]
    d = driver(8, clock=lambda: time[0])
    a, _ = d.prefill(range(12), retention=[Retention(0, None, 80, 0.010)])
    b, _ = d.prefill(range(100, 112), retention=[Retention(0, None, 50)])
    d.ledger.release(a)
    d.ledger.release(b)
    time[0] = 0.050
    c, _ = d.prefill(range(200, 212))
    d.ledger.release(c)
    assert d.ledger.peek(range(100, 113)) == 12
    assert d.ledger.peek(range(13)) < 12


def test_a_duration_starts_at_release() -> None:
    time = [0.0]
    d = driver(8, clock=lambda: time[0])
    a, _ = d.prefill(range(12), retention=[Retention(0, None, 80, 1.0)])
    time[0] = 100.0
    d.ledger.release(a)
    b, _ = d.prefill(range(100, 112))
    d.ledger.release(b)
    d.prefill(range(200, 212))
    assert d.ledger.peek(range(13)) == 12


def test_earlier_ranges_win_and_touch_whole_blocks() -> None:
    """Ranges are exclusive at the end; a block with any token in one has its priority; the first range wins."""
    d = driver(8)
    a, _ = d.prefill(range(12), retention=[Retention(0, 5, 60), Retention(0, None, 10)])
    d.ledger.release(a)
    d.prefill(range(100, 124))
    assert d.ledger.stats().evicted_by_priority == {10: 1}
    assert d.ledger.peek(range(13)) == 8


def test_leaves_go_first() -> None:
    """KVCacheManagerLeafBlockTest, 4 blocks: a new sequence gets {2}; 12 tokens find 11; the 5th block throws."""
    d = driver(4)
    a, _ = d.prefill(range(8))
    assert d.blocks(a) == [0, 1]
    d.ledger.release(a)
    b, _ = d.prefill([100])
    assert d.blocks(b) == [2]
    d.ledger.release(b)
    c, step = d.prefill(range(12))
    assert d.cached(step, c) == 8
    with pytest.raises(OutOfBlocks):
        d.begin([(d.open(range(200, 208)), 8)])


def test_rewinding_over_a_block_border_gives_blocks_back() -> None:
    """KVCacheManagerRewindTokensTest: free counts follow the border."""
    d = driver(8)
    a, _ = d.prefill(range(9))
    assert d.ledger.stats().free == 5
    d.ledger.rewind(a, 1)
    assert (d.ledger.stats().free, d.ledger.stats().used) == (6, 2)
    d.ledger.rewind(a, 4)
    assert (d.ledger.stats().used, d.ledger.stats().cached) == (1, 1)
    d.ledger.rewind(a, 3)
    d.ledger.check()
    assert d.ledger.tokens(a) == [0]


def test_a_rewound_block_is_the_next_to_go() -> None:
    d = driver(4)
    b, _ = d.prefill(range(100, 104))
    d.ledger.release(b)
    a, _ = d.prefill(range(8))
    d.ledger.rewind(a, 4)
    d.prefill([200, 201, 202, 203, 204])
    assert d.ledger.peek(range(100, 105)) == 4  # older, and yet still there


def test_a_window_never_writes_into_a_block_again() -> None:
    """MaxAttentionWindowTest, window 16: there the window wraps around, and reuse reads what was overwritten (a FIXME).

    Ours has no cycle: blocks behind the window are given back, the table says -1, what is stored stays what it was.
    """
    d = Driver(make_plan((Lifetime(window=16), 16)))
    a, _ = d.prefill(range(16))
    assert d.blocks(a) == [0, 1, 2, 3]
    d.generate(a, *range(16, 24))
    assert d.blocks(a)[:2] == [-1, -1]
    d.ledger.release(a)
    b, step = d.prefill(range(25))
    assert d.cached(step, b) == 24
    assert d.blocks(b)[:2] == [-1, -1]


def test_two_windows_match_what_both_hold() -> None:
    """VariableWindowAttentionWithReuseTest, windows 16 and 8: 7 tokens {0,1}/{0,1}; again finds them."""
    d = Driver(make_plan((Lifetime(window=16), 16), (Lifetime(window=8), 16)))
    a, _ = d.prefill(range(7))
    assert (d.blocks(a, 0), d.blocks(a, 1)) == ([0, 1], [0, 1])
    d.generate(a, 7, 8)
    assert (d.blocks(a, 0), d.blocks(a, 1)) == ([0, 1, 2], [0, 1, 2])
    d.ledger.release(a)
    b, step = d.prefill(range(9))
    assert d.cached(step, b) == 8
    c, step = d.prefill(range(4))
    assert d.cached(step, c) == 3


def test_neighbouring_lengths_find_what_is_stored() -> None:
    """KVCacheManagerHashKeyWithReuseTest: 16 tokens, then 20: position 16 of ours, whole blocks plus nothing more.

    There the last token of a stored sequence is not stored (position 15): here it is, since it was computed.
    """
    d = driver(8)
    a, _ = d.prefill(range(16))
    d.ledger.release(a)
    b, step = d.prefill(range(20))
    assert (d.cached(step, b), d.blocks(b)) == (16, [0, 1, 2, 3, 4])


def test_events_tell_what_is_stored_and_removed() -> None:
    """KVCacheManagerEventStream: 10 tokens with lora 42 store blocks behind one another; the same tokens say nothing.

    Ours: tiers speak for themselves, so `removed` follows the eviction; a tail is stored at release.
    """
    d = driver(8, events=64)
    a, _ = d.prefill(range(10), lora_id=42)
    stored = d.ledger.events()
    assert [(e.kind, e.start, e.token_ids) for e in stored] == [
        ("stored", 0, (0, 1, 2, 3)),
        ("stored", 4, (4, 5, 6, 7)),
    ]
    assert stored[0].parent is None
    assert stored[1].parent == stored[0].key
    assert {e.lora_id for e in stored} == {b"i42"}
    d.ledger.release(a)
    tail = d.ledger.events()
    assert [(e.kind, e.start, e.token_ids, e.parent) for e in tail] == [("stored", 8, (8, 9), stored[1].key)]
    b, _ = d.prefill(range(8), lora_id=42)
    d.ledger.release(b)
    assert [e.kind for e in d.ledger.events()] == []
    d.prefill(range(100, 132))
    events = d.ledger.events()
    assert [e.start for e in events if e.kind == "removed"] == [8, 4, 0]
    numbers = [e.number for e in (*stored, *tail, *events)]
    assert numbers == list(range(len(numbers)))


def test_a_full_ring_loses_the_oldest_and_shows_the_gap() -> None:
    """EventStreamOverflow: a ring of 1 keeps the last."""
    d = driver(8, events=1)
    d.prefill(range(12))
    assert [(e.number, e.start) for e in d.ledger.events()] == [(2, 8)]


def test_a_new_priority_is_told() -> None:
    """EventStreamPriority: 50 when stored; found again with 10: an update."""
    d = driver(8, events=64)
    a, _ = d.prefill(range(8), retention=[Retention(0, None, 50)])
    d.ledger.release(a)
    assert {e.priority for e in d.ledger.events()} == {50}
    b, _ = d.prefill([*range(8), 8], retention=[Retention(0, None, 10)])
    updated = [e for e in d.ledger.events() if e.kind == "updated"]
    assert [(e.start, e.priority) for e in updated] == [(0, 10), (4, 10)]
    c, _ = d.prefill([*range(8), 9])  # says nothing about retention: nothing changes
    assert [e for e in d.ledger.events() if e.kind == "updated"] == []
    assert b != c


def test_beams_share_all_but_what_they_write() -> None:
    """Beam search as forks: full blocks shared, the partly filled one copied on the first write, r - 1 times."""
    d = driver(16)
    a, _ = d.prefill(range(10))
    beams = [a, d.fork(a), d.fork(a), d.fork(a)]
    assert d.ledger.stats().used == 3
    for i, s in enumerate(beams):
        d.extend(s, 50 + i)
    step = d.step(*((s, 1) for s in beams))
    assert len(step.copies) == 3
    assert {tuple(d.blocks(s)[:2]) for s in beams} == {(0, 1)}
    assert len({d.blocks(s)[2] for s in beams}) == 4


def test_snapshots_of_states() -> None:
    """V2's SSM tests: no snapshot, no reuse; a match ends at the last snapshot within it; a fork before it finds 0.

    Ours: the last block border before the prompt's last token, every interval and the end are kept.
    """
    d = Driver(make_plan((FULL, 32), (None, 16), checkpoint_interval=16))
    a, _ = d.prefill(range(21))
    d.ledger.release(a)
    assert d.ledger.peek(range(22)) == 21  # the end
    assert d.ledger.peek([*range(20), 99, 98]) == 20  # the border before the last token
    assert d.ledger.peek([*range(19), 99, 98]) == 16  # the interval
    assert d.ledger.peek([*range(15), 99, 98]) == 0


def test_identity_is_the_same_for_lists_and_arrays() -> None:
    """test_int32_ndarray_ingest: numpy and list hash alike."""
    import numpy as np

    d = driver(8)
    tokens = list(range(9))
    keys = [d.ledger.keys(d.ledger.open(t)) for t in (tokens, np.array(tokens, np.int32), np.array(tokens, np.int64))]  # type: ignore[arg-type]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == 2
