"""Faults other caches shipped, kinds c (wrong hits), e (leaks, eviction) and f (windows), named by their case."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import OutOfBlocks, UnsupportedError
from kvpool.kinds import Lifetime
from kvpool.ledger import Ledger, Media, Policy, Retention, StepArrays
from kvpool.ledger.policies import Cost


def driver(blocks: int = 32, n: int = 4, **options: object) -> Driver:
    return Driver(make_plan((FULL, blocks), n=n), **options)


def test_c01_lora_x_and_salt_x_never_meet() -> None:
    d = driver()
    a, _ = d.prefill(range(9), lora_id="x")
    d.ledger.release(a)
    assert d.ledger.peek(range(9), salt="x") == 0
    assert d.ledger.peek(range(9), lora_id="x") == 8


def test_c02_an_adapter_is_who_the_caller_says_it_is() -> None:
    d = driver()
    a, _ = d.prefill(range(9), lora_id="adapter@sha256:1111")
    d.ledger.release(a)
    assert d.ledger.peek(range(9), lora_id="adapter@sha256:2222") == 0


def test_c03_70000_media_digests_give_no_false_hit() -> None:
    plan = make_plan((FULL, 64), max_step_tokens=64)
    ledger, arrays = Ledger(plan), StepArrays.from_plan(plan)
    prompt = [7] * 9
    for i in range(70_000):
        seq = ledger.open(prompt, media=(Media(0, 8, i.to_bytes(32, "little")),))
        decision = ledger.begin_step([(seq, 9)], arrays)
        assert decision.admitted[0].num_cached_tokens == 0, i
        ledger.end_step(decision)
        ledger.release(seq)
    assert ledger.peek(prompt, media=(Media(0, 8, (69_999).to_bytes(32, "little")),)) == 8
    ledger.check()


def test_c04_a_media_key_is_opaque_and_compared_in_full() -> None:
    d = driver()
    pixels = bytes(3000)
    a, _ = d.prefill(range(9), media=(Media(1, 6, b"30x100" + pixels),))
    d.ledger.release(a)
    assert d.ledger.peek(range(9), media=(Media(1, 6, b"100x30" + pixels),)) == 0
    assert d.ledger.peek(range(9), media=(Media(2, 6, b"30x100" + pixels),)) == 0, "the same item elsewhere"
    assert d.ledger.peek(range(9), media=(Media(1, 6, b"30x100" + pixels),)) == 8


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_c05_c22_colliding_hashes_cost_time_and_nothing_else(bits: int) -> None:
    d = driver(48, finder_bits=bits)
    r = random.Random(bits)
    for _ in range(60):
        a, _ = d.prefill([r.randrange(2) for _ in range(r.randrange(1, 30))])
        d.ledger.release(a)
    d.ledger.check()
    assert d.ledger.stats().hit_tokens > 100


def test_c07_two_writers_of_one_tail_get_a_copy() -> None:
    d = Driver(make_plan((FULL, 16), n=16))
    donor, _ = d.prefill(range(10))
    used = d.ledger.stats().used
    a, b = d.open([*range(10), 50]), d.open([*range(10), 60])
    d.ledger.release(donor)
    step = d.step((a, 11), (b, 11))
    assert [x.num_cached_tokens for x in step.admitted] == [10, 10]
    assert len(step.copies) == 1, "one takes the tail over, the other copies"
    d.generate(a, 51, 52)
    d.generate(b, 61, 62)
    d.ledger.release(a)
    d.ledger.release(b)
    assert (d.ledger.stats().used, used) == (0, 1)


def test_c09_all_groups_report_one_length() -> None:
    d = Driver(make_plan((FULL, 32), (Lifetime(window=8), 32)))
    a, _ = d.prefill(range(40))
    d.ledger.release(a)
    b, step = d.prefill([*range(30), 99, 98])
    matched = d.cached(step, b)
    assert matched == d.ledger.num_cached_tokens(b)
    assert len(d.blocks(b, 0)) == len(d.blocks(b, 1)) == 8


def test_c11_a_whole_prompt_hit_computes_one_token_and_the_chain_goes_on() -> None:
    d = driver()
    a, _ = d.prefill(range(16))
    d.ledger.release(a)
    b, step = d.prefill(range(16))
    assert (d.cached(step, b), step.total_tokens) == (15, 1)
    d.generate(b, *range(16, 21))
    d.ledger.release(b)
    assert d.ledger.peek(range(21)) == 20


def test_c12_c23_nothing_is_found_behind_a_hole() -> None:
    d = driver(8)
    a, _ = d.prefill(range(16))
    d.ledger.release(a)
    d.prefill(range(100, 120))  # takes 4 free ones and the last of the chain
    assert d.ledger.peek(range(17)) == 12


def test_c14_rejected_drafts_leave_and_rewinds_are_exact() -> None:
    d = driver()
    a, _ = d.prefill(range(7))
    d.generate(a, 7, 8, 9, 10, 11)
    d.rewind(a, 3)
    assert d.ledger.tokens(a) == list(range(9))
    with pytest.raises(ValueError, match=r"rewind takes 0\.\.9 tokens"):
        d.ledger.rewind(a, -2)
    with pytest.raises(ValueError, match=r"rewind takes 0\.\.9 tokens"):
        d.ledger.rewind(a, 10)
    d.rewind(a, 6)  # over a block border
    d.generate(a, 50, 51, 52)
    d.ledger.check()
    w = Driver(make_plan((Lifetime(window=4), 16)))
    b, _ = w.prefill(range(24))
    for i in range(8):  # what lies behind goes
        s, _ = w.prefill(range(100 * i + 100, 100 * i + 120))
        w.ledger.release(s)
    before = (w.ledger.tokens(b), w.ledger.table(b))
    with pytest.raises(UnsupportedError):
        w.ledger.rewind(b, 16)
    assert before == (w.ledger.tokens(b), w.ledger.table(b))


def test_c16_a_state_carries_its_position() -> None:
    d = Driver(make_plan((FULL, 32), (None, 16), checkpoint_interval=8))
    a, _ = d.prefill(range(25))
    d.ledger.release(a)
    for length in (9, 12, 17, 22, 25):
        b, step = d.prefill([*range(length), 99])  # the driver checks which state is read
        assert d.cached(step, b) in (8, 16, 24, 25)
        d.ledger.release(b, keep=False)


def test_c19_the_same_prompt_again_and_again_reads_the_same() -> None:
    d = Driver(make_plan((FULL, 400), (Lifetime(window=64), 400), n=16, max_seq_len=2048, max_step_tokens=2048))
    prompt = [i * 7 % 1000 for i in range(1464)]
    hits = []
    for _ in range(4):
        a, step = d.prefill(prompt)
        hits.append(d.cached(step, a))
        d.generate(a, 1, 2, 3)
        d.ledger.release(a)
    assert hits == [0, 1463, 1463, 1463]


def test_c20_keys_are_equal_in_two_interpreters() -> None:
    code = (
        "from ledger_plans import FULL, make_plan; from kvpool.ledger import Ledger, Media;"
        "l = Ledger(make_plan((FULL, 8)));"
        "s = l.open(range(9), salt='s', lora_id=3, media=[Media(2, 3, 'cat')]); print([k.hex() for k in l.keys(s)])"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    d = driver()
    keys = d.ledger.keys(d.open(range(9), salt="s", lora_id=3, media=[Media(2, 3, "cat")]))
    assert found[0].strip() == str([k.hex() for k in keys])


def test_e01_nothing_leaks_over_2000_lives() -> None:
    d = driver(16)
    r = random.Random(1)
    for i in range(2000):
        seq = d.ledger.open([r.randrange(50) for _ in range(r.choice([3, 4, 5, 7, 8, 9]))])
        step = d.ledger.begin_step([(seq, 9)], d.arrays)
        d.ledger.end_step(step)
        d.ledger.extend([seq], [1])
        d.ledger.end_step(d.ledger.begin_step([(seq, 1)], d.arrays))
        d.ledger.release(seq, keep=i % 2 == 0)
    d.ledger.check()
    assert d.ledger.stats().used == 0


@pytest.mark.parametrize("keep", [True, False])
def test_e02_counters_add_up_after_every_call(keep: bool) -> None:
    d = driver(8)
    for i in range(20):
        a, _ = d.prefill(range(i, i + 9))
        d.ledger.release(a, keep)
        (g,) = d.ledger.stats().groups
        assert g.used + g.cached + g.free == g.committed == 8
        assert g.used == 0


def test_e06_a_second_release_is_a_no_op() -> None:
    d = driver(8)
    a, _ = d.prefill(range(9))
    d.ledger.rewind(a, 5)
    d.ledger.release(a)
    before = d.ledger.stats()
    d.ledger.release(a)
    d.ledger.check()
    assert d.ledger.stats() == before


def test_e09_only_leaves_leave_until_nothing_is_left() -> None:
    d = driver(60, events=1000)
    r = random.Random(3)
    for _ in range(30):
        a, _ = d.prefill([r.randrange(2) for _ in range(r.randrange(1, 20))])
        d.ledger.release(a)
    stored = {e.key: e.parent for e in d.ledger.events() if e.kind == "stored"}
    a, _ = d.prefill(range(1000, 1240))
    left = [e.key for e in d.ledger.events() if e.kind == "removed"]
    assert d.ledger.stats().cached == 0
    for i, key in enumerate(left):
        assert all(stored.get(k) != key for k in left[i + 1 :]), "a parent left before its child"


def test_e11_a_policy_decides_between_a_long_and_a_short_sequence() -> None:
    def survivors(policy: str | Policy) -> tuple[int, int]:
        d = Driver(make_plan((FULL, 258), n=4, max_seq_len=2048, max_step_tokens=2048), policy=policy)
        long, short = list(range(1024)), list(range(5000, 5008))
        for prompt in (long, short):
            a, _ = d.prefill(prompt)
            d.ledger.release(a)
        d.prefill([9999])
        return d.ledger.peek([*long, 1]), d.ledger.peek([*short, 1])

    assert survivors("lru") == (1020, 8)
    assert survivors(Cost(crossover_tokens=256, weight=4)) == (1024, 4)


def test_e12_l04_an_impossible_request_fails_at_once_with_numbers() -> None:
    d = Driver(make_plan((FULL, 229), n=16, max_seq_len=4096, max_step_tokens=4096))
    with pytest.raises(OutOfBlocks, match=r"4096 tokens needs 256 blocks .* 229 blocks of 16 tokens \(3664 tokens\)"):
        d.open(range(4096))


def test_e13_lower_priorities_go_first_and_lru_decides_within_one() -> None:
    time = [0.0]
    d = driver(12, clock=lambda: time[0])
    for start, priority, duration in ((0, 90, None), (100, 10, None), (200, 35, None), (300, 10, None), (400, 80, 1.0)):
        a, _ = d.prefill(range(start, start + 8), retention=[Retention(0, None, priority, duration)])
        d.ledger.release(a)
    time[0] = 2.0
    order = []
    live = dict.fromkeys((0, 100, 200, 300, 400), 8)
    for i in range(10):
        d.prefill([1000 + 10 * i, *range(1, 4)])
        for start, length in live.items():
            now = d.ledger.peek([*range(start, start + 8), 99])
            if now < length:
                order.append(start)
                live[start] = now
    assert order[:4] == [100, 100, 300, 300]
    assert order[4:8] == [200, 200, 400, 400]


def test_e15_finished_requests_hold_nothing() -> None:
    d = driver(8)
    for i in range(4):
        a, _ = d.prefill(range(100 * i, 100 * i + 8))
        d.ledger.release(a)
    d.prefill(range(900, 908))
    assert d.ledger.stats().evicted_blocks == 2
    assert d.ledger.peek(range(9)) == 0


def test_e16_looking_does_not_pin() -> None:
    d = driver(8)
    a, _ = d.prefill(range(8))
    d.ledger.release(a)
    b, _ = d.prefill(range(100, 108))
    d.ledger.release(b)
    for _ in range(1000):
        d.ledger.peek(range(9))
    d.prefill(range(200, 224))
    assert d.ledger.peek(range(9)) == 0
    assert d.ledger.peek(range(100, 109)) == 8


def test_f01_f02_a_window_of_128_holds_positions_73_to_200() -> None:
    d = Driver(make_plan((Lifetime(window=128), 300), n=2))
    a, _ = d.prefill(range(200))
    d.extend(a, 200)
    d.step((a, 1))
    d.extend(a, 201)
    step = d.begin([(a, 1)])  # position 201 sees 74..201
    row = d.arrays.groups[0].block_table[0]
    assert row[74 // 2] >= 0
    assert row[72 // 2] == -1
    d.ledger.end_step(step)


@pytest.mark.parametrize("chunk", [1, 5])
def test_f05_one_token_or_five_the_same_blocks_are_kept(chunk: int) -> None:
    d = Driver(make_plan((Lifetime(window=8), 64)))
    a = d.open(range(40))
    while d.ledger.num_computed_tokens(a) < 40:
        d.step((a, chunk))
    assert [i for i, b in enumerate(d.blocks(a)) if b >= 0] == [8, 9]


def test_f07_after_a_sink_the_oldest_go() -> None:
    d = Driver(make_plan((Lifetime(window=8, sink_tokens=4), 64), n=2))
    a, _ = d.prefill(range(19))
    d.extend(a, 19)
    step = d.begin([(a, 1)])  # position 19 sees 12..19 and 0..3
    held = {p for p in range(20) if d.arrays.groups[0].block_table[0, p // 2] >= 0}
    assert held == {0, 1, 2, 3, *range(12, 20)}
    d.ledger.end_step(step)


def test_l11_what_a_pause_left_is_no_hit() -> None:
    d = driver()
    a, _ = d.prefill(range(9))
    d.ledger.pause(a)
    assert d.ledger.stats().used == 0
    d.ledger.resume(a)
    d.extend(a, 9)
    d.step((a, 10))
    stats = d.ledger.stats()
    assert (stats.hit_tokens, stats.missed_tokens, stats.resumed_tokens) == (0, 9, 9)


def below(blocks: int) -> Driver:
    """A driver whose store is a tier below, asked at admission."""
    d = driver(blocks, offer=True)
    d.ledger._lookup = lambda keys: next((i for i, k in enumerate(keys) if (0, k) not in d.store), len(keys))
    return d


@pytest.mark.parametrize("released", [True, False])
def test_e04_blocks_on_their_way_up_are_held_until_the_step_ends_and_then_freed(released: bool) -> None:
    d = below(8)
    a, _ = d.prefill(range(17))
    d.ledger.release(a)
    b, _ = d.prefill(range(100, 132))
    d.ledger.release(b)
    c = d.open(range(17))
    before = d.ledger.stats()
    step = d.begin([(c, 17)])
    assert len(step.onboards) == 4
    if released:
        d.ledger.release(c)  # whoever fills the blocks may go on
        assert d.ledger.stats().used == 5
    d.ledger.abort_step(step)  # it never came
    d.ledger.check()
    after = d.ledger.stats()
    assert (after.used, after.onboarded_tokens, after.hit_tokens) == (0, 0, before.hit_tokens)
    if not released:
        assert d.step((c, 17)).admitted[0].num_cached_tokens in (0, 16)


def test_e08_what_leaves_one_tier_is_counted_in_the_next() -> None:
    d = below(8)
    held = 0
    for i in range(6):
        a, step = d.prefill(range(100 * i, 100 * i + 16))
        d.ledger.release(a)
        stats = d.ledger.stats()
        held += len(step.evicted)
        assert held == len(d.store) == stats.evicted_blocks
        assert (stats.used, stats.cached + stats.free) == (0, 8)
    a, step = d.prefill([*range(16), 99])
    assert (len(step.onboards), d.ledger.stats().onboarded_tokens) == (4, 16)
    assert d.ledger.stats().evicted_blocks == held + len(step.evicted)
