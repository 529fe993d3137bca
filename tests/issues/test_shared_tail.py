"""A partly filled block that a fork still held was stored as a tail; what the fork stored later had no block."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ledger"))
from ledger_driver import Driver
from ledger_plans import FULL, make_plan


def test_a_block_that_a_fork_still_holds_is_stored_by_the_last_one_to_leave_it() -> None:
    d = Driver(make_plan((FULL, 16)))
    a = d.open(range(8))
    d.step((a, 8), commit=False)
    b = d.fork(a)
    d.rewind(b, 2)  # its tail is a part of a block that both hold and nobody stored
    d.ledger.release(b)
    d.ledger.check()
    assert d.ledger.peek([*range(6), 99]) == 4
    d.ledger.release(a)
    d.ledger.check()
    assert d.ledger.peek([*range(8), 99]) == 8
    assert d.ledger.stats().used == 0
