"""Pins, resize, clear, tiers' hooks, policies, threads."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import OutOfBlocks
from kvpool.ledger import Ledger, Media, Released, StepArrays


def driver(blocks: int = 16, **options: object) -> Driver:
    return Driver(make_plan((FULL, blocks), reserved=64), **options)


def test_a_pinned_prefix_stays() -> None:
    d = driver(8)
    a, _ = d.prefill(range(8))
    d.ledger.release(a)
    pin = d.ledger.pin(range(8))
    assert pin.num_tokens == 8
    for i in range(5):
        b, _ = d.prefill(range(100 * i + 100, 100 * i + 124))
        d.ledger.release(b)
    assert d.ledger.peek(range(9)) == 8
    d.ledger.unpin(pin)
    d.prefill(range(900, 932))
    assert d.ledger.peek(range(9)) == 0
    with pytest.raises(ValueError, match="is not held"):
        d.ledger.unpin(pin)


def test_a_group_grows_and_shrinks_at_its_end() -> None:
    d = driver(16)
    a, _ = d.prefill(range(40))
    with pytest.raises(OutOfBlocks):
        d.begin([(d.open(range(100, 132)), 32)])
    assert d.resize(0, 32) == 32
    b, _ = d.prefill(range(100, 132))
    d.ledger.release(a)
    e, _ = d.prefill(range(200, 220))
    assert max(d.blocks(e)) >= 18
    assert d.resize(0, 16) == 16  # a's blocks go, e's move down
    d.ledger.check()
    assert max(d.blocks(e) + d.blocks(b)) < 16
    d.generate(e, 220, 221)
    d.generate(b, 132)
    with pytest.raises(ValueError, match=r"can have 1\.\.64 blocks"):
        d.ledger.resize(0, 65)


def test_a_pin_stops_a_shrink_and_is_named() -> None:
    d = driver(16)
    a, _ = d.prefill(range(40))
    b, _ = d.prefill(range(100, 108))
    d.ledger.release(a)
    d.ledger.release(b)
    pin = d.ledger.pin(range(100, 108))
    done = d.ledger.resize(0, 4)
    assert (done.num_blocks, done.stopped_by) == (12, 11)
    d.ledger.unpin(pin)
    assert d.ledger.resize(0, 4).num_blocks == 4
    d.ledger.check()


def test_what_is_in_use_stops_a_shrink() -> None:
    d = driver(16)
    d.prefill(range(40))
    assert d.resize(0, 4) == 10
    d.ledger.check()


def test_clearing_a_salt_forgets_it_alone() -> None:
    d = driver(32)
    for salt in ("a", "b", None):
        s, _ = d.prefill(range(9), salt=salt)
        d.ledger.release(s)
    running, _ = d.prefill(range(9), salt="a")
    d.ledger.clear("a")
    d.ledger.check()
    assert [d.ledger.peek(range(10), salt=s) for s in ("a", "b", None)] == [0, 9, 9]
    d.generate(running, 9, 10, 11, 12)
    d.ledger.release(running)
    d.ledger.check()
    assert d.ledger.peek(range(10), salt="a") == 0
    d.ledger.clear()
    assert d.ledger.stats().cached == 0
    assert d.ledger.stats().free == d.ledger.stats().committed


def test_reset_frees_everything_and_old_ids_are_gone() -> None:
    d = driver()
    a, _ = d.prefill(range(9))
    d.ledger.pin(range(8))
    step = d.begin([(d.open([5, 6]), 2)])
    with pytest.raises(ValueError, match="while a step is open"):
        d.ledger.reset()
    d.ledger.end_step(step)
    d.ledger.reset()
    d.ledger.check()
    stats = d.ledger.stats()
    assert (stats.free, stats.num_nodes, stats.num_sequences) == (stats.committed, 0, 0)
    with pytest.raises(ValueError, match=f"sequence {a} is not open"):
        d.ledger.tokens(a)


def test_what_is_evicted_is_offered_and_found_again_below() -> None:
    d = driver(8, offer=True)
    d.ledger._lookup = lambda keys: next((i for i, k in enumerate(keys) if (0, k) not in d.store), len(keys))
    a, _ = d.prefill(range(18))
    d.ledger.release(a)
    b, _ = d.prefill(range(100, 132))
    d.ledger.release(b)
    assert len(d.store) == 5
    assert d.ledger.peek(range(18)) == 0
    c, step = d.prefill(range(18))
    assert [(o.index, o.key) for o in step.onboards] == list(enumerate(d.ledger.keys(c)))
    assert (d.cached(step, c), step.total_tokens) == (16, 2)
    assert d.ledger.stats().onboarded_tokens == 16
    e, step = d.prefill(range(17))
    assert (d.cached(step, e), step.onboards) == (16, ())


class MostRecent:
    """A policy of three lines: the newest goes first."""

    def keys(self, released: Released) -> np.ndarray:
        return np.full(len(released.blocks), -float(released.now))


def test_a_policy_of_the_user_s_decides() -> None:
    d = driver(8, policy=MostRecent())
    for i in range(4):
        a, _ = d.prefill(range(100 * i, 100 * i + 8))
        d.ledger.release(a)
    d.prefill(range(900, 908))
    assert [d.ledger.peek(range(100 * i, 100 * i + 9)) for i in range(4)] == [8, 8, 8, 0]


def test_a_policy_that_fails_leaves_the_order_of_release() -> None:
    class Broken:
        def keys(self, released: Released) -> np.ndarray:
            raise RuntimeError("no idea")

    d = driver(8, policy=Broken())
    for i in range(4):
        seq = d.open(range(100 * i, 100 * i + 8))
        d.step((seq, 8))
        with pytest.raises(RuntimeError, match="no idea"):
            d.ledger.release(seq)
        d.ledger.check()
    d.prefill(range(900, 908))
    assert d.ledger.peek(range(9)) == 0


@pytest.mark.parametrize("policy", ["lfu", "fifo", "cost", "count-lru"])
def test_every_policy_keeps_the_rule_of_leaves(policy: str) -> None:
    d = driver(12, policy=policy)
    for i in range(40):
        a, _ = d.prefill([i % 3, *range(i % 7 * 3)])
        d.ledger.release(a)
    assert d.ledger.stats().evicted_blocks > 0


def test_lfu_keeps_what_is_found_often() -> None:
    d = driver(8, policy="lfu")
    for prompt in (range(9), range(9), range(9), range(100, 109), range(200, 209), range(300, 309), range(400, 409)):
        a, _ = d.prefill(prompt)
        d.ledger.release(a, keep=False)
    assert d.ledger.peek(range(9)) == 8


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="policy must be one of lru, "):
        driver(8, policy="mru")
    with pytest.raises(TypeError, match="needs a method keys"):
        driver(8, policy=object())


def test_bad_arguments_are_named() -> None:
    d = driver()
    with pytest.raises(ValueError, match=r"ids are 0 \.\. 2147483647"):
        d.ledger.open([1, -1])
    with pytest.raises(TypeError, match="token ids must be ints"):
        d.ledger.open([1, "a"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="int32 or int64"):
        d.ledger.open(np.zeros(3))  # type: ignore[arg-type]
    a = d.open([1, 2])
    with pytest.raises(ValueError, match="given twice"):
        d.begin([(a, 1), (a, 1)])
    with pytest.raises(ValueError, match="sequence 77 is not open"):
        d.begin([(a, 1), (77, 1)])
    d.ledger.check()
    d.step((a, 2))


def test_threads_open_extend_release_and_look() -> None:
    plan = make_plan((FULL, 256), max_sequences=16, max_step_tokens=512)
    ledger, faults = Ledger(plan, events=256), []
    stop = threading.Event()
    opened: list[int] = []

    def guard(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except Exception as error:
            faults.append(error)

    def opener(base: int) -> None:
        for i in range(400):
            seq = ledger.open(list(range(base, base + 5 + i % 20)))
            opened.append(seq)
            ledger.append(seq, [1, 2])
            ledger.peek(list(range(base, base + 9)))
            if i % 3 == 0:
                ledger.release(seq)

    def looker() -> None:
        while not stop.is_set():
            (g,) = ledger.stats().groups
            assert g.used + g.cached + g.free == g.committed
            ledger.events()

    workers = [threading.Thread(target=guard, args=(lambda b=b: opener(b),)) for b in (0, 1000)]
    watcher = threading.Thread(target=guard, args=(looker,))
    for t in (*workers, watcher):
        t.start()
    arrays = StepArrays.from_plan(plan)
    while any(t.is_alive() for t in workers):
        items = [(s, 64) for s in opened[-4:]]
        with contextlib.suppress(OutOfBlocks, ValueError):  # released meanwhile
            ledger.end_step(ledger.begin_step(items, arrays))
        for s in opened[:-4]:
            ledger.release(s)
    stop.set()
    for t in (*workers, watcher):
        t.join(20)
        assert not t.is_alive(), "deadlock"
    assert not faults
    ledger.check()


def test_sha256_agrees_with_hashlib() -> None:
    import hashlib

    from kvpool import _native

    for size in (0, 1, 31, 55, 56, 63, 64, 65, 96, 119, 120, 128, 1000):
        data = bytes(i * 37 % 256 for i in range(size))
        for portable in (False, True):
            assert _native.sha256(data, portable) == hashlib.sha256(data).digest(), (size, portable)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 128])
@pytest.mark.parametrize("portable", [False, True])
def test_an_identity_is_sha_256_over_named_fields(n: int, portable: bool) -> None:
    import hashlib

    def number(value: int) -> bytes:
        return value.to_bytes(4, "little")

    d = Driver(make_plan((FULL, 64), n=n), events=64, portable_sha=portable)
    prompt = [1 + 7 * i for i in range(3 * n + 1)]
    cat = Media(n, n + 1, b"cat" * 30)
    seq, _ = d.prefill(prompt, media=(cat,))
    d.ledger.release(seq)  # the last token is stored as a block that is not whole
    parent = hashlib.sha256(b"KVS1" + b"S" + bytes(8) + b"L" + bytes(8)).digest()[:16]
    expected = []
    for i in range(4):
        held = prompt[i * n : (i + 1) * n]
        item = [i * n - cat.start, cat.num_tokens, 91]  # where the block begins in it, its tokens, its key
        extras = b"M" + np.array(item, "<i8").tobytes() + b"b" + b"cat" * 30 if i in (1, 2) else b""
        body = b"".join(map(number, held)) + extras
        header = parent + b"KVB1" + number(n) + number(len(held)) + number(len(extras))
        parent = hashlib.sha256(body + header).digest()[:16]
        expected.append(parent)
    assert [e.key for e in d.ledger.events()] == expected
    again = d.ledger.open(prompt, media=(cat,))
    assert d.ledger.keys(again) == expected[:3]


@pytest.mark.parametrize("policy", ["lru", "count-lru"])
def test_bookkeeping_stays_under_256_bytes_a_block(policy: str) -> None:
    ledger = Ledger(make_plan((FULL, 1_000_000), n=16, max_step_tokens=2048, max_sequences=64), policy=policy)
    assert ledger.stats().bookkeeping_bytes / 1_000_000 <= 256
