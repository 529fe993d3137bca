"""Reuse as TensorRT-LLM's BlockManagerReuseTest pins it (8 blocks of 4 tokens); a docstring says where ours differs."""

from __future__ import annotations

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import OutOfBlocks


@pytest.fixture
def driver() -> Driver:
    return Driver(make_plan((FULL, 8)))


def test_full_blocks_then_a_partial_one_are_reused(driver: Driver) -> None:
    """Ours differs in one point: everything computed is stored (10 of 11 tokens), as in TensorRT-LLM's release."""
    a, d = driver.prefill(list(range(9)))
    assert driver.blocks(a) == [0, 1, 2]
    assert driver.cached(d, a) == 0
    driver.generate(a, 9)  # 10 computed: [0-3] [4-7] [8, 9]
    driver.ledger.release(a)
    b, d = driver.prefill(list(range(9)))  # at least one token is left to compute
    assert (driver.cached(d, b), driver.blocks(b)) == (8, [0, 1, 3])
    driver.ledger.release(b)
    c, d = driver.prefill(list(range(10)))  # the tail leaf [8, 9] is unused: taken over, not copied
    assert (driver.cached(d, c), driver.blocks(c)[:2]) == (9, [0, 1])
    assert d.copies == ()


def test_a_tail_in_use_is_copied(driver: Driver) -> None:
    a, _ = driver.prefill(list(range(10)))
    driver.ledger.release(a)
    b, d = driver.prefill(list(range(10)))
    assert (driver.cached(d, b), driver.blocks(b), d.copies) == (9, [0, 1, 2], ())
    c, d = driver.prefill([*range(8), 20, 21])  # [8, 9] left the tree with b
    assert (driver.cached(d, c), driver.blocks(c)) == (8, [0, 1, 3])
    e, d = driver.prefill([0, 1, 2, 3, 4, 5, 30])  # block 1 is in use: 2 tokens of it are copied
    assert (driver.cached(d, e), driver.blocks(e)) == (6, [0, 4])
    assert [(x.src, x.dst, x.num_tokens) for x in d.copies] == [(1, 4, 2)]


def test_a_prompt_of_one_token_reuses_nothing(driver: Driver) -> None:
    a, _ = driver.prefill([7])
    driver.ledger.release(a)
    b, d = driver.prefill([7])
    assert driver.cached(d, b) == 0


def test_a_whole_prompt_hit_leaves_one_token_and_the_chain_goes_on(driver: Driver) -> None:
    prompt = list(range(16))
    a, _ = driver.prefill(prompt)
    driver.ledger.release(a)
    b, d = driver.prefill(prompt)
    assert driver.cached(d, b) == 15
    driver.generate(b, 50, 51, 52, 53)
    driver.ledger.release(b)
    c, d = driver.prefill([*prompt, 50, 51, 52, 53, 54])
    assert driver.cached(d, c) == 20


def test_equal_prompts_of_one_step_are_computed_once(driver: Driver) -> None:
    a, b = driver.open(list(range(10))), driver.open(list(range(10)))
    d = driver.step((a, 10), (b, 10))
    assert [x.num_cached_tokens for x in d.admitted] == [0, 8]
    assert driver.blocks(a) == [0, 1, 2]
    assert driver.blocks(b) == [0, 1, 3]
    assert d.total_tokens == 12


def test_holding_commits_back_shares_nothing(driver: Driver) -> None:
    a, b = driver.open(list(range(10))), driver.open(list(range(10)))
    d = driver.step((a, 10), (b, 10), commit=False)
    assert [x.num_cached_tokens for x in d.admitted] == [0, 0]
    c, d = driver.prefill(list(range(8)))
    assert driver.cached(d, c) == 0


def test_salt_and_lora_keep_apart() -> None:
    driver = Driver(make_plan((FULL, 64)))
    tokens = list(range(6))
    for options in ({"salt": "x"}, {"lora_id": "x"}, {"salt": b"x"}, {"salt": 1}, {"salt": "1"}, {}):
        a, d = driver.prefill(tokens, **options)
        assert driver.cached(d, a) == 0, options
        driver.ledger.release(a)
    b, d = driver.prefill(tokens, lora_id="x")
    assert driver.cached(d, b) == 5


def test_leaves_go_first_and_the_oldest_of_them(driver: Driver) -> None:
    a, _ = driver.prefill(list(range(100, 116)))
    driver.ledger.release(a)
    b, _ = driver.prefill(list(range(200, 212)))
    driver.ledger.release(b)
    c, _ = driver.prefill(list(range(300, 309)))  # needs 3: one is free, the two last of a go
    assert driver.ledger.stats().evicted_blocks == 2
    driver.ledger.release(c)
    d, decision = driver.prefill(list(range(100, 116)))
    assert driver.cached(decision, d) == 8


def test_what_does_not_fit_changes_nothing(driver: Driver) -> None:
    a, _ = driver.prefill(list(range(20)))
    before = driver.ledger.stats()
    b, c = driver.open(list(range(100, 108))), driver.open(list(range(200, 206)))
    with pytest.raises(OutOfBlocks, match=r"needs 4 blocks, has 3 free and 0 cached of 8 \(5 in use\)") as error:
        driver.begin([(b, 8), (c, 8)])
    assert error.value.sequences == (c,)
    assert driver.ledger.fits([(b, 8), (c, 8)]) == 1
    driver.ledger.check()
    assert driver.ledger.stats().groups == before.groups
    driver.step((b, 8))
    assert driver.blocks(a) == [0, 1, 2, 3, 4]


def test_a_prompt_that_can_never_fit_is_refused_at_once(driver: Driver) -> None:
    with pytest.raises(OutOfBlocks, match=r"33 tokens needs 9 blocks of group 0, which has 8 blocks of 4 tokens"):
        driver.open(list(range(33)))
    with pytest.raises(OutOfBlocks, match="longer than max_seq_len = 1024"):
        driver.open(list(range(1025)))


def test_an_aborted_step_leaves_everything_as_it_was(driver: Driver) -> None:
    a, _ = driver.prefill(list(range(9)))
    b = driver.open(list(range(9)))
    driver.extend(a, 9)
    before = driver.ledger.stats()
    tables = driver.blocks(a)
    d = driver.begin([(a, 1), (b, 9)])
    driver.ledger.abort_step(d)
    driver.ledger.check()
    assert driver.ledger.stats().groups == before.groups
    assert (driver.blocks(a), driver.blocks(b)) == (tables, [])
    assert driver.ledger.num_computed_tokens(a) == 9
    d = driver.step((a, 1), (b, 9))
    assert driver.cached(d, b) == 8


def test_room_is_shared_out_in_order() -> None:
    driver = Driver(make_plan((FULL, 64), max_step_tokens=16))
    a, b, c = driver.open(list(range(10))), driver.open(list(range(50, 60))), driver.open([1, 2, 3])
    d = driver.step((a, 10), (b, 10), (c, 10))
    assert d.sequences == (a, b)
    assert driver.arrays.num_tokens[:3].tolist() == [10, 6, 0]
    assert (d.num_samples, d.sampled) == (1, (a,))
    assert driver.ledger.num_computed_tokens(b) == 6
    d = driver.step((b, 10), (c, 2))
    assert driver.arrays.num_tokens[:3].tolist() == [4, 2, 0]
    assert d.sampled == (b,)


def test_release_twice_and_of_an_open_step(driver: Driver) -> None:
    a = driver.open(list(range(9)))
    d = driver.begin([(a, 9)])
    driver.ledger.release(a)
    assert driver.ledger.stats().used == 3
    driver.ledger.end_step(d)
    driver.ledger.check()
    assert (driver.ledger.stats().used, driver.ledger.stats().cached) == (0, 3)
    driver.ledger.release(a)
