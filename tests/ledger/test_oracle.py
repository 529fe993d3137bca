"""The native ledger and a ledger of other construction answer the same, whatever is asked (hypothesis, stateful)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ledger_driver import Driver
from ledger_plans import FULL, make_plan
from oracle import Full, Oracle

from kvpool.errors import OutOfBlocks

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
ROOM = 24
BLOCKS = 14


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(make_plan((FULL, BLOCKS), n=4, max_step_tokens=ROOM, max_sequences=16))
        self.oracle = Oracle(4, BLOCKS)
        self.live: list[int] = []

    @rule(tokens=TOKENS, salt=st.sampled_from([None, "s"]))
    def open(self, tokens: list[int], salt: str | None) -> None:
        if len(self.live) < 8:
            seq = self.driver.open(tokens, salt=salt)
            self.oracle.open(seq, tokens, salt)
            self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), commit=st.booleans(), abort=st.sampled_from([False, False, True]))
    def step(self, data: st.DataObject, commit: bool, abort: bool) -> None:
        seqs = data.draw(st.lists(st.sampled_from(self.live), min_size=1, unique=True))
        items = [(s, data.draw(st.sampled_from([1, 3, 20]))) for s in seqs]
        try:
            expected = self.oracle.step(items, ROOM, commit, abort)
        except Full:
            with pytest.raises(OutOfBlocks):
                self.driver.begin(items, commit=commit)
            return
        decision = self.driver.begin(items, commit=commit)
        assert {a.sequence: a.num_cached_tokens for a in decision.admitted} == expected
        (self.driver.ledger.abort_step if abort else self.driver.ledger.end_step)(decision)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        if self.driver.ledger.num_tokens(seq) < 30:
            self.driver.extend(seq, token)
            self.oracle.extend(seq, token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.driver.ledger.release(seq, keep)
        self.oracle.release(seq, keep)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        count = data.draw(st.integers(0, self.driver.ledger.num_tokens(seq)))
        self.driver.rewind(seq, count)
        self.oracle.rewind(seq, count)

    @rule(tokens=TOKENS, salt=st.sampled_from([None, "s"]))
    def peek(self, tokens: list[int], salt: str | None) -> None:
        assert self.driver.ledger.peek(tokens, salt=salt) == self.oracle.peek(tokens, salt)

    @invariant()
    def agree(self) -> None:
        self.driver.ledger.check()
        (group,) = self.driver.ledger.stats().groups
        cached = self.oracle.cached()
        assert (group.free, group.cached) == (self.oracle.free, cached)
        assert group.used == BLOCKS - self.oracle.free - cached


QUICK = settings(
    max_examples=60, stateful_step_count=30, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


def test_the_ledger_answers_like_the_oracle() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


@pytest.mark.slow
def test_the_ledger_answers_like_the_oracle_for_long() -> None:
    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=600, stateful_step_count=60))
