"""Drafts are nobody's until accepted; two steps may be in flight; what fails leaves no trace."""

from __future__ import annotations

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan


@pytest.fixture
def d() -> Driver:
    return Driver(make_plan((FULL, 64), num_draft=6))


def test_drafts_are_never_committed(d: Driver) -> None:
    a, _ = d.prefill(range(6))
    d.extend(a, 6)
    d.ledger.end_step(d.begin([(a, 1)], {a: ([7, 8, 9, 10, 11], None)}))
    assert d.ledger.peek([*range(12), 99]) == 4
    d.accept(a, [])
    d.ledger.check()
    assert d.blocks(a) == [0, 1]
    d.ledger.release(a)
    assert d.ledger.peek([*range(12), 99]) == 7


def test_an_accepted_branch_moves_together(d: Driver) -> None:
    a, _ = d.prefill(range(6))
    d.extend(a, 6)
    #  draft 0 and 1 follow the last token; 2 follows 1; 3 follows 2; 4 follows 0
    d.ledger.end_step(d.begin([(a, 1)], {a: ([50, 60, 61, 62, 51], [-1, -1, 1, 2, 0])}))
    d.accept(a, [1, 2, 3])
    d.ledger.check()
    assert d.ledger.tokens(a) == [*range(7), 60, 61, 62]
    d.generate(a, 63)
    assert d.ledger.peek([*range(7), 60, 99]) == 8


def test_what_does_not_follow_is_refused(d: Driver) -> None:
    a, _ = d.prefill(range(6))
    d.extend(a, 6)
    d.ledger.end_step(d.begin([(a, 1)], {a: ([50, 60, 61], [-1, -1, 1])}))
    with pytest.raises(ValueError, match="draft 2 does not follow 0"):
        d.accept(a, [0, 2])
    with pytest.raises(ValueError, match="a parent is an earlier draft"):
        d.begin([(a, 1)], {a: ([50, 60], [1, 0])})
    with pytest.raises(ValueError, match="num_draft = 6"):
        d.begin([(a, 1)], {a: ([1] * 7, None)})


def test_a_step_is_opened_before_the_last_one_ended(d: Driver) -> None:
    a, _ = d.prefill(range(7))
    d.extend(a, 7)
    first = d.begin([(a, 1)])
    d.extend(a, 8, known=False)
    second = d.begin([(a, 1)])
    assert d.arrays.token_ids[0] == -1
    assert d.arrays.positions[0] == 8
    d.ledger.end_step(first)
    assert d.ledger.peek([*range(8), 99]) == 8
    d.resolve(a)
    d.ledger.end_step(second)
    d.ledger.check()
    assert d.ledger.tokens(a) == list(range(9))


def test_a_block_with_an_unknown_id_is_not_matchable(d: Driver) -> None:
    a, _ = d.prefill(range(6))
    d.extend(a, 6)
    first = d.begin([(a, 1)])
    d.extend(a, 7, known=False)
    second = d.begin([(a, 1)])
    d.ledger.end_step(first)
    d.ledger.end_step(second)
    assert d.ledger.peek([*range(8), 99]) == 4
    d.resolve(a)
    assert d.ledger.peek([*range(8), 99]) == 8


def test_if_a_step_fails_the_next_one_is_cancelled(d: Driver) -> None:
    a, _ = d.prefill(range(6))
    d.extend(a, 6)
    before = d.ledger.stats().groups
    first = d.begin([(a, 1)])
    d.extend(a, 7, known=False)
    d.begin([(a, 1)])
    d.ledger.abort_step(first)
    d.ledger.check()
    assert d.ledger.tokens(a) == list(range(7))
    assert d.ledger.stats().groups == before
    d.tokens(a)
    d.step((a, 1))


def test_a_third_step_waits_and_order_is_kept(d: Driver) -> None:
    seqs = [d.open([i, i]) for i in range(3)]
    first, second = d.begin([(seqs[0], 2)]), d.begin([(seqs[1], 2)])
    with pytest.raises(ValueError, match="two steps are open"):
        d.begin([(seqs[2], 2)])
    with pytest.raises(ValueError, match="cannot end before step"):
        d.ledger.end_step(second)
    d.ledger.end_step(first)
    d.ledger.end_step(second)
    with pytest.raises(ValueError, match="is not open"):
        d.ledger.end_step(second)
