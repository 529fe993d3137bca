"""Several groups: one match valid in all of them at once; windows, chunks and states keep the right blocks."""

from __future__ import annotations

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import UnsupportedError
from kvpool.kinds import Lifetime


@pytest.mark.parametrize(
    ("others", "found"), [(("window",), 28), (("state",), 20), (("window", "state"), 12), ((), 28)]
)
def test_the_minimum_of_the_groups_own_answers_can_be_invalid(others: tuple[str, ...], found: int) -> None:
    """The window alone says 28, the state alone 20; but at 20 the window lacks what it reads: the answer is 12."""
    groups = {"window": (Lifetime(window=5), 8), "state": (None, 16)}
    d = Driver(make_plan((FULL, 32), *(groups[name] for name in others)))
    a, _ = d.prefill(range(21))  # keeps a state at 20, the last border of the prompt
    d.ledger.release(a, keep=False)
    b, _ = d.prefill(range(13))  # keeps a state at 12
    d.generate(b, *range(13, 29))  # decoding keeps no more: blocks behind the window go first
    d.ledger.release(b, keep=False)
    d.prefill(range(100, 121))  # 6 blocks of the window group: the three behind the window make room
    assert d.ledger.peek([*range(28), 99, 98]) == found


@pytest.mark.parametrize("window", [1, 4, 5, 8, 9, 13])
def test_a_window_keeps_exactly_what_the_next_token_sees(window: int) -> None:
    d = Driver(make_plan((Lifetime(window=window), 64)))
    a, _ = d.prefill(range(3))
    for t in range(3, 40):
        d.generate(a, t)
        held = [i for i, b in enumerate(d.blocks(a)) if b >= 0]
        first = max(0, t + 1 - window + 1) // 4
        assert held == list(range(first, t // 4 + 1)), t


def test_sinks_stay() -> None:
    d = Driver(make_plan((Lifetime(window=8, sink_tokens=4), 64)))
    a, _ = d.prefill(range(20))
    d.generate(a, 20)
    assert [i for i, b in enumerate(d.blocks(a)) if b >= 0] == [0, 3, 4, 5]
    d.ledger.release(a)
    b, step = d.prefill(range(22))
    assert d.cached(step, b) == 21


def test_a_chunk_starts_anew() -> None:
    d = Driver(make_plan((Lifetime(chunk=8), 64)))
    a, _ = d.prefill(range(16))
    assert d.blocks(a) == [-1, -1, -1, -1]
    d.generate(a, 16)
    assert [i for i, b in enumerate(d.blocks(a)) if b >= 0] == [4]


def test_blocks_behind_a_window_go_before_others() -> None:
    d = Driver(make_plan((Lifetime(window=4), 10), checkpoint_interval=1024))
    a, _ = d.prefill(range(100, 108))
    d.ledger.release(a)
    b, _ = d.prefill(range(24))  # 6 blocks, of which the first ones are behind the window now
    d.prefill(range(200, 216))
    assert d.ledger.peek(range(100, 109)) == 8
    assert d.ledger.num_computed_tokens(b) == 24


def test_checkpoints_of_a_window_outlive_what_lies_between() -> None:
    d = Driver(make_plan((FULL, 64), (Lifetime(window=5), 12), checkpoint_interval=16))
    a, _ = d.prefill(range(40))
    d.ledger.release(a)
    for i in range(3):
        s, _ = d.prefill(range(1000 * i + 100, 1000 * i + 108))
        d.ledger.release(s)
    assert d.ledger.peek([*range(18), 99, 98]) == 16
    assert d.ledger.peek([*range(14), 99, 98]) < 12


def test_a_state_step_ends_at_checkpoints() -> None:
    d = Driver(make_plan((FULL, 64), (None, 16), checkpoint_interval=8))
    a = d.open(range(21))
    lengths = []
    while d.ledger.num_computed_tokens(a) < 21:
        lengths.append(d.step((a, 21)).total_tokens)
    assert lengths == [8, 8, 4, 1]


def test_a_state_is_read_from_one_slot_and_written_to_another() -> None:
    d = Driver(make_plan((FULL, 64), (None, 16)))
    a, _ = d.prefill(range(3))
    before = d.ledger.state(a, 1)
    d.generate(a, 3)
    assert d.ledger.state(a, 1) != before
    d.extend(a, 4)
    step = d.begin([(a, 1)])
    d.ledger.abort_step(step)
    d.ledger.check()
    d.step((a, 1))


def test_rewinding_a_state_to_what_was_not_kept_is_refused_before_anything_changes() -> None:
    d = Driver(make_plan((FULL, 64), (None, 16), checkpoint_interval=8))
    a, _ = d.prefill(range(21))
    before = (d.ledger.tokens(a), d.ledger.table(a), d.ledger.state(a, 1))
    with pytest.raises(UnsupportedError, match=r"cannot be rewound to 19 tokens: group 1 kept no state there"):
        d.ledger.rewind(a, 2)
    assert before == (d.ledger.tokens(a), d.ledger.table(a), d.ledger.state(a, 1))
    d.rewind(a, 5)
    assert d.ledger.num_tokens(a) == 16
    d.generate(a, 70, 71)


def test_states_after_each_draft_are_kept_until_one_is_chosen() -> None:
    d = Driver(make_plan((FULL, 64), (None, 16), num_draft=3))
    a, _ = d.prefill(range(5))
    d.extend(a, 5)
    step = d.begin([(a, 1)], {a: ([6, 7, 8], None)})
    d.ledger.end_step(step)
    d.accept(a, [0, 1])
    d.ledger.check()
    assert d.ledger.tokens(a) == [0, 1, 2, 3, 4, 5, 6, 7]
    d.generate(a, 9)


def test_windows_alone_keep_their_nodes_within_bounds() -> None:
    """Nodes without blocks stay while something hangs below them; their number is capped by evicting."""
    d = Driver(make_plan((Lifetime(window=5), 16), max_seq_len=4096, max_step_tokens=64))
    for i in range(30):
        a, _ = d.prefill([i, *range(60)])
        d.generate(a, *range(100, 160))
        d.ledger.release(a)
        d.ledger.check()
        assert d.ledger.stats().num_nodes <= 2 * 16 + 2 * (64 // 4 + 16)


@pytest.mark.parametrize("on_device", [False, True], ids=["all comes", "only the state comes"])
def test_a_state_comes_from_below_with_the_blocks_the_tree_lacks(on_device: bool) -> None:
    d = Driver(make_plan((FULL, 16), (None, 8), checkpoint_interval=8), offer=True)
    prompt = list(range(18))
    a = d.open(prompt)
    while d.ledger.num_computed_tokens(a) < 18:
        d.step((a, 18))
    keys = d.ledger.keys(a)
    d.ledger.release(a)
    if on_device:  # short prompts push the states out
        for number in range(8):
            d.ledger.release(d.prefill([100 + number])[0])
    else:
        b = d.open(range(200, 264))
        while d.ledger.num_computed_tokens(b) < 64:
            d.step((b, 64))
        d.ledger.release(b, keep=False)
    c = d.open(prompt)
    blocks, states = d.ledger.in_tree(c)
    assert (list(blocks), list(states)) == ([on_device] * 4, [0] * 4)
    assert (1, keys[3]) in d.store, "the last border before the end of the prompt is a checkpoint"
    d.ledger.expect(c, 4)
    step = d.step((c, 18))  # the driver checks what the step reads
    wanted = [(1, 3)] if on_device else [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]
    assert [(o.group, o.index) for o in step.onboards] == wanted
    assert [o.key for o in step.onboards] == [keys[index] for _, index in wanted]
    assert (d.cached(step, c), step.total_tokens) == (16, 2)
    assert d.ledger.peek(prompt) == 16, "it is in the tree again"
    d.ledger.release(c)
    d.ledger.check()


def test_an_aborted_step_gives_back_what_was_to_come_from_below() -> None:
    d = Driver(make_plan((FULL, 16), (None, 8), checkpoint_interval=8), offer=True)
    c = d.open(range(18))
    before = d.ledger.stats()
    d.ledger.expect(c, 4)
    decision = d.ledger.begin_step([(c, 18)], d.buffers[d.turn])
    assert len(decision.onboards) == 5
    d.ledger.abort_step(decision)
    d.ledger.check()
    assert d.ledger.stats().groups == before.groups
    assert d.ledger.peek(range(18)) == 0


def test_what_comes_from_below_is_not_matched_where_its_window_lacks_blocks() -> None:
    """A block on its way up has no window block where its own sequence does not need one: others cannot use it."""
    d = Driver(make_plan((FULL, 16), (Lifetime(window=5), 16)), offer=True)
    a, _ = d.prefill(range(37))
    d.ledger.release(a)
    b, _ = d.prefill(range(100, 164))
    d.ledger.release(b, keep=False)
    assert d.ledger.peek(range(37)) == 0
    n = 9
    d.ledger._lookup = lambda keys: n if len(keys) == n and (1, keys[-1]) in d.store else 0
    c, e = d.open(range(37)), d.open([*range(18), 99, 98, 97])
    step = d.step((c, 37), (e, 37))  # the driver checks every block that e reads
    assert (d.cached(step, c), d.cached(step, e)) == (36, 0)
    assert {o.index for o in step.onboards if o.group == 1} == {8}
    f, step = d.prefill([*range(36), 99])
    assert d.cached(step, f) == 36
