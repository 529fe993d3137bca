"""What is worth a copy when it is evicted is measured, by how often it was found before."""

from __future__ import annotations

from kvpool.tiers.hit_value import EVERY, SAMPLES, HitValue

ONCE, NEVER = 1, 0


def evict(values: HitValue, uses: int, first: int, count: int, found: float) -> float:
    """Evict blocks of a kind, of which a share is found again at once; return the share that was kept."""
    kept = 0
    for number in range(first, first + count):
        block = (0, f"{uses} {number}".encode())
        if values.admit(block, uses):
            kept += 1
            if number % 100 < found * 100:
                values.hit(block)
    return kept / count


def test_everything_is_kept_until_enough_is_known() -> None:
    values = HitValue()
    assert values.rate(NEVER) == 1.0
    assert evict(values, NEVER, 0, SAMPLES, found=0.0) == 1.0


def test_a_kind_that_never_comes_back_is_sampled_only_and_a_kind_that_does_is_kept() -> None:
    values = HitValue()
    many = 20 * EVERY * SAMPLES
    evict(values, NEVER, 0, many, found=0.0)
    evict(values, ONCE, 0, many, found=0.1)
    assert values.rate(NEVER) == 0.0
    assert 0.05 < values.rate(ONCE) < 1.0
    assert evict(values, NEVER, many, 10_000, found=0.0) == 1 / EVERY
    assert evict(values, ONCE, many, 10_000, found=0.1) == 1.0


def test_a_kind_is_kept_again_when_the_load_changes() -> None:
    """The samples go on: old ones count half whenever enough new ones have come."""
    values = HitValue()
    many = 20 * EVERY * SAMPLES
    evict(values, NEVER, 0, many, found=0.0)
    assert evict(values, NEVER, many, 10_000, found=0.0) < 0.2
    evict(values, NEVER, 2 * many, many, found=0.5)
    assert values.rate(NEVER) > values.min_rate
    assert evict(values, NEVER, 3 * many, 10_000, found=0.0) == 1.0


def test_kinds_beyond_the_last_count_as_one() -> None:
    values = HitValue()
    evict(values, 4, 0, 20 * EVERY * SAMPLES, found=0.0)
    assert values.rate(4) == values.rate(1000) < values.min_rate
