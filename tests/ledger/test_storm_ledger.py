"""Random operations with token-coded pages: what a step reads is what its sequence wrote; check() after each."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import OutOfBlocks, UnsupportedError
from kvpool.kinds import Lifetime
from kvpool.ledger import Media, Pin, Retention, StepDecision

GROUPS: dict[str, list[tuple[Lifetime | None, int]]] = {
    "full": [(FULL, 40)],
    "full+window": [(FULL, 40), (Lifetime(window=7), 40)],
    "full+window+sink+chunk": [(FULL, 44), (Lifetime(window=6, sink_tokens=3), 44), (Lifetime(chunk=8), 44)],
    "windows": [(Lifetime(window=5), 30), (Lifetime(window=9), 40)],
    "chunk": [(Lifetime(chunk=6), 30)],
    "full+state": [(FULL, 40), (None, 30)],
    "window+state": [(Lifetime(window=5), 36), (None, 30)],
    "state": [(None, 30)],
}


class Storm:
    """Every operation, chosen at random. Content is the driver's matter, consistency check()'s, counts ours."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver, self.ledger, self.r = driver, driver.ledger, random.Random(seed)
        self.live: list[int] = []
        self.pins: list[Pin] = []
        self.open_steps: list[StepDecision] = []
        self.done: dict[str, int] = {}
        self.refused: list[bool] = []
        self.parents: dict[int, list[int]] = {}

    def text(self) -> list[int]:
        r = self.r
        return [1] * r.choice([0, 0, 5, 9]) + [r.randrange(2) for _ in range(r.randrange(1, 26))]

    def options(self) -> dict[str, Any]:
        r = self.r
        return {"salt": r.choice([None, None, None, "s"]), "media": r.choice([(), (), (), (Media(3, 4, "cat"),)])}

    def idle(self) -> int | None:
        busy = {s for d in self.open_steps for s in d.sequences}
        free = [s for s in self.live if s not in busy]
        return self.r.choice(free) if free else None

    def op_open(self) -> None:
        r = self.r
        retention = [Retention(0, r.choice([4, 9, None]), r.choice([0, 20, 60, 100]), r.choice([None, 1.0, 5.0]))]
        self.live.append(
            self.driver.open(
                self.text(),
                retention=retention if r.random() < 0.3 else (),
                max_cached_tokens=r.choice([None, None, None, 6]),
                **self.options(),
            )
        )

    def op_begin(self) -> None:
        r = self.r
        if len(self.open_steps) == 2:
            return self.op_end()
        items = [(s, r.choice([1, 3, 8, 100])) for s in r.sample(self.live, r.randrange(len(self.live) + 1))]
        num_draft = self.driver.plan.num_draft
        busy = {s for d in self.open_steps for s in d.sequences}
        drafts = {}
        for s, _ in items:
            if num_draft and r.random() < 0.3 and s not in busy and self.known(s):
                k = r.randrange(1, num_draft + 1)
                chain = r.random() < 0.5
                parents = None if chain else [r.randrange(-1, i) for i in range(k)]
                drafts[s] = ([r.randrange(2) for _ in range(k)], parents)
                self.parents[s] = parents or list(range(-1, k - 1))
        fits = self.ledger.fits(items)
        try:
            self.open_steps.append(self.driver.begin(items, drafts, commit=r.random() < 0.9))
        except OutOfBlocks:
            self.refused.append(fits < len(items) or bool(drafts))
            return
        decision = self.open_steps[-1]
        if decision.sampled and r.random() < 0.5 and not drafts:
            self.count("unknown")
            for s in decision.sampled:
                self.driver.extend(s, r.randrange(2), known=False)

    def known(self, seq: int) -> bool:
        stats = self.ledger.sequence_stats(seq)
        return stats.num_known == stats.num_tokens

    def op_end(self) -> None:
        r = self.r
        if not self.open_steps:
            return
        if r.random() < 0.15:
            at = r.randrange(len(self.open_steps))
            self.ledger.abort_step(self.open_steps[at])
            self.count("aborted")
            del self.open_steps[at:]
            return
        decision = self.open_steps.pop(0)
        self.ledger.end_step(decision)
        for d in decision.drafts:
            if d.sequence in self.live and not any(d.sequence in o.sequences for o in self.open_steps):
                self.accept(d.sequence, d.num_rows)
        for s in decision.sampled:
            if s not in self.live:
                continue
            if not self.known(s):
                self.driver.resolve(s)
            elif r.random() < 0.8 and self.ledger.num_tokens(s) < 60:
                self.driver.extend(s, r.randrange(2))

    def accept(self, seq: int, num_rows: int) -> None:
        path, at = [], -1
        while self.r.random() < 0.7:
            following = [i for i in range(num_rows) if self.parents[seq][i] == at]
            if not following:
                break
            at = self.r.choice(following)
            path.append(at)
        self.driver.accept(seq, path)
        self.count("accepted", len(path))

    def op_release(self) -> None:
        if self.live:
            self.ledger.release(self.live.pop(self.r.randrange(len(self.live))), self.r.random() < 0.8)

    def op_rewind(self) -> None:
        seq = self.idle()
        if seq is None:
            return
        before = (self.ledger.tokens(seq), self.ledger.table(seq), self.ledger.stats())
        n = self.r.randrange(min(10, self.ledger.num_tokens(seq)) + 1)
        try:
            self.ledger.rewind(seq, n)
            self.driver.tokens(seq)
            self.count("rewound")
        except UnsupportedError:
            assert before == (self.ledger.tokens(seq), self.ledger.table(seq), self.ledger.stats())
            self.count("not rewound")

    def op_fork(self) -> None:
        seq = self.idle()
        if seq is not None and len(self.live) < 12:
            self.live.append(self.driver.fork(seq))

    def op_pause(self) -> None:
        seq = self.idle()
        if seq is not None:
            self.ledger.pause(seq)
            if self.r.random() < 0.3:
                self.ledger.release(seq)
                self.live.remove(seq)
            else:
                self.ledger.resume(seq)

    def op_pin(self) -> None:
        if self.pins and self.r.random() < 0.6:
            self.ledger.unpin(self.pins.pop(self.r.randrange(len(self.pins))))
        elif len(self.pins) < 2:
            text, options = self.text(), self.options()
            found = self.ledger.peek(text, **options)
            before = self.ledger.stats()
            pin = self.ledger.pin(text, **options)
            assert pin.num_tokens <= found + self.driver.plan.groups[0].tokens_per_block * 99
            assert before.committed == self.ledger.stats().committed
            self.pins.append(pin)

    def op_clear(self) -> None:
        if self.r.random() < 0.15:
            self.ledger.clear(self.r.choice([None, "s"]))

    def op_resize(self) -> None:
        if self.open_steps or self.r.random() < 0.5:
            return
        g = self.r.randrange(len(self.driver.plan.groups))
        plan = self.driver.plan.groups[g]
        want = self.r.randrange(plan.num_blocks * 3 // 4, plan.num_blocks_reserved + 1)
        got = self.driver.resize(g, want)
        assert got >= want
        assert self.ledger.stats().groups[g].committed == got
        self.count("resized")

    def count(self, what: str, n: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + n

    def run(self, operations: int) -> None:
        weights = {
            self.op_open: 5, self.op_begin: 10, self.op_end: 10, self.op_release: 4, self.op_rewind: 2, self.op_fork: 1,
            self.op_pause: 1, self.op_pin: 1, self.op_clear: 1, self.op_resize: 1,
        }  # fmt: skip
        choices = self.r.choices(list(weights), list(weights.values()), k=operations)
        for op in choices:
            op()
            self.ledger.check()
            for g in self.ledger.stats().groups:
                assert g.used + g.cached + g.free == g.committed
        while self.open_steps:
            self.ledger.end_step(self.open_steps.pop(0))
        for seq in self.live:
            self.ledger.release(seq)
        for pin in self.pins:
            self.ledger.unpin(pin)
        self.ledger.check()
        assert self.ledger.stats().used == 0
        assert all(self.refused)
        self.ledger.reset()
        self.ledger.check()
        assert self.ledger.stats().free == self.ledger.stats().committed


def make_driver(groups: str, **options: Any) -> Driver:
    time = iter(x * 0.1 for x in range(10**9))
    return Driver(
        make_plan(
            *GROUPS[groups], max_step_tokens=40, max_sequences=8, num_draft=3, checkpoint_interval=8, reserved=60
        ),
        clock=lambda: next(time),
        events=64,
        **options,
    )


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("seed", "options"), [(1, {}), (2, {}), (3, {"finder_bits": 0}), (4, {"policy": "count-lru"})])
def test_random_operations_keep_every_page_right(groups: str, seed: int, options: dict[str, Any]) -> None:
    print(f"seed {seed}")
    storm = Storm(make_driver(groups, **options), seed)
    storm.run(400)
    print(storm.done, storm.ledger.stats())


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(20))
def test_many_random_operations_keep_every_page_right(groups: str, seed: int) -> None:
    Storm(make_driver(groups, policy=["lru", "count-lru"][seed % 2], finder_bits=[64, 0][seed % 5 == 4]), seed).run(
        6300
    )
