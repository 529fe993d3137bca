"""Random operations with token-coded pages: what a step reads is what its sequence wrote; check() after each."""

from __future__ import annotations

import random

import pytest
from ledger_driver import Driver
from ledger_plans import FULL, make_plan

from kvpool.errors import OutOfBlocks


def storm(driver: Driver, seed: int, operations: int) -> None:
    r = random.Random(seed)
    live: list[int] = []
    refused: list[bool] = []
    for _ in range(operations):
        op = r.random()
        if op < 0.3 or not live:
            tokens = [r.randrange(2) for _ in range(r.randrange(1, 30))]
            if r.random() < 0.5:
                tokens = [1] * r.randrange(1, 12) + tokens
            live.append(driver.open(tokens, salt=r.choice([None, None, None, "s"])))
        elif op < 0.75:
            items = [(s, r.choice([1, 3, 8, 100])) for s in r.sample(live, r.randrange(1, len(live) + 1))]
            fits = driver.ledger.fits(items)
            try:
                d = driver.begin(items, commit=r.random() < 0.9)
            except OutOfBlocks as e:
                refused.append(e.sequences[0] in dict(items) and fits < len(items))
            else:
                driver.ledger.check()
                if r.random() < 0.2:
                    driver.ledger.abort_step(d)
                else:
                    driver.ledger.end_step(d)
                    if r.random() < 0.8 and d.sampled:
                        driver.ledger.extend(d, [r.randrange(2) for _ in d.sampled])
        else:
            seq = live.pop(r.randrange(len(live)))
            driver.ledger.release(seq, r.random() < 0.8)
        driver.ledger.check()
    for seq in live:
        driver.ledger.release(seq)
    driver.ledger.check()
    assert all(refused)
    stats = driver.ledger.stats()
    assert stats.used == 0
    assert stats.free + stats.cached == stats.committed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bits", [64, 0])
def test_random_operations_keep_every_page_right(seed: int, bits: int) -> None:
    print(f"seed {seed}")
    storm(Driver(make_plan((FULL, 40), max_step_tokens=40, max_sequences=8), finder_bits=bits), seed, 600)
