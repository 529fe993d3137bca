"""What every tier must do, as one class: subclass it in a test file and give it an `open_tier` fixture.

class TestMine(TierConformance):
    @pytest.fixture
    def open_tier(self, tmp_path): ...   # yields (budget_bytes=...) -> Tier
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from kvpool.errors import TierError
from kvpool.tiers.base import Entry, Identity, Outcome, Status, Tier

from . import blocks

Open = Callable[..., Tier]
WAIT_S = 20.0


def put(tier: Tier, entries: list[Entry], *, cuts: int = 1) -> list[Outcome]:
    """Store entries with their content, wait, return the outcomes."""
    memory, batch = blocks.stored(entries, cuts=cuts)
    ticket = tier.put(batch, deadline_s=WAIT_S)
    assert ticket.wait(WAIT_S)
    del memory
    return ticket.outcomes


def get(tier: Tier, entries: list[Entry], *, cuts: int = 1) -> list[Outcome]:
    """Read entries, verify every byte of each hit, return the outcomes."""
    memory, batch = blocks.room(entries, cuts=cuts)
    ticket = tier.get(batch)
    assert ticket.wait(WAIT_S)
    for index, (entry, outcome) in enumerate(zip(entries, ticket.outcomes, strict=True)):
        if outcome.ok:
            assert memory.get(index) == blocks.content(entry, memory.num_bytes), f"foreign bytes for {entry}"
    return ticket.outcomes


def statuses(outcomes: list[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


class TierConformance:
    """The tests; `durable` subclasses also outlive a close."""

    @pytest.fixture
    def tier(self, open_tier: Open) -> Iterator[Tier]:
        tier = open_tier()
        yield tier
        tier.check()
        assert tier.close(WAIT_S)

    def test_it_is_a_tier_with_a_name_and_an_identity(self, tier: Tier) -> None:
        assert isinstance(tier, Tier)
        assert tier.name
        assert tier.identity == blocks.IDENTITY

    def test_what_was_put_is_there_and_comes_back_bit_for_bit_in_every_group(self, tier: Tier) -> None:
        for group in range(len(blocks.BLOCK_BYTES)):
            entries = blocks.chain(group, 5, group=group)
            assert tier.exists([e.id for e in entries]) == [False] * 5
            assert statuses(put(tier, entries)) == [Status.STORED] * 5
            assert tier.exists([e.id for e in entries]) == [True] * 5
            assert statuses(get(tier, entries)) == [Status.HIT] * 5

    def test_a_block_may_be_put_in_pieces_and_read_in_others(self, tier: Tier) -> None:
        entries = blocks.chain(1, 4)
        put(tier, entries, cuts=7)
        for cuts in (1, 3, 7, 50):
            assert statuses(get(tier, entries, cuts=cuts)) == [Status.HIT] * 4

    def test_what_is_not_there_is_a_miss_and_the_rest_of_the_batch_a_hit(self, tier: Tier) -> None:
        held, other = blocks.chain(1, 3), blocks.chain(2, 3)
        put(tier, held)
        mixed = [held[0], other[0], held[1], other[1], held[2]]
        want = [Status.HIT, Status.MISS, Status.HIT, Status.MISS, Status.HIT]
        assert statuses(get(tier, mixed)) == want
        assert tier.exists([e.id for e in mixed]) == [s is Status.HIT for s in want]

    def test_a_copy_is_kept_when_it_is_read(self, tier: Tier) -> None:
        entries = blocks.chain(1, 3)
        put(tier, entries)
        for _ in range(3):
            assert statuses(get(tier, entries)) == [Status.HIT] * 3
        written = tier.stats().written_bytes
        assert statuses(put(tier, entries)) == [Status.STORED] * 3
        assert tier.stats().written_bytes == written, "a block that is there was written again"

    def test_the_same_block_twice_in_a_batch_is_stored_once(self, tier: Tier) -> None:
        entry = blocks.chain(1, 1)[0]
        outcomes = statuses(put(tier, [entry, entry, entry]))
        assert outcomes[0] is Status.STORED
        assert set(outcomes) <= {Status.STORED, Status.REFUSED}
        assert tier.stats().num_blocks == 1
        assert statuses(get(tier, [entry, entry])) == [Status.HIT] * 2

    @pytest.mark.parametrize("field", ["tokens", "extras", "parent", "position"])
    def test_a_key_with_other_content_is_refused_by_the_name_of_the_field(self, tier: Tier, field: str) -> None:
        entry = blocks.chain(1, 2)[1]
        put(tier, [entry])
        other = {"tokens": bytes(len(entry.tokens)), "extras": b"salt", "parent": bytes(16), "position": 400}[field]
        asked = dataclasses.replace(entry, **{field: other})  # type: ignore[arg-type]
        outcome = get(tier, [asked])[0]
        assert outcome.status is Status.MISMATCH
        assert field in outcome.detail
        assert tier.stats().mismatch == 1
        assert statuses(get(tier, [entry])) == [Status.HIT]

    def test_the_same_key_in_two_groups_is_two_blocks(self, tier: Tier) -> None:
        first = blocks.chain(1, 1)[0]
        second = dataclasses.replace(first, group=1)
        put(tier, [first])
        assert tier.exists([second.id]) == [False]
        put(tier, [second])
        assert statuses(get(tier, [first])) + statuses(get(tier, [second])) == [Status.HIT] * 2

    def test_partly_filled_blocks_and_long_extras_come_back(self, tier: Tier) -> None:
        for tokens, extras in ((1, b""), (3, b"x" * 5000), (700, b"y" * 65_536)):
            entries = blocks.chain(tokens, 2, tokens_per_block=tokens, extras=extras)
            put(tier, entries)
            assert statuses(get(tier, entries)) == [Status.HIT] * 2

    def test_dropped_blocks_are_gone_and_can_be_put_again(self, tier: Tier) -> None:
        entries = blocks.chain(1, 4)
        put(tier, entries)
        assert tier.drop([entries[1].id, entries[3].id, blocks.chain(9, 1)[0].id]) == 2
        assert tier.exists([e.id for e in entries]) == [True, False, True, False]
        assert statuses(get(tier, entries)) == [Status.HIT, Status.MISS, Status.HIT, Status.MISS]
        put(tier, entries)
        assert statuses(get(tier, entries)) == [Status.HIT] * 4

    def test_notify_names_every_block_once_before_the_ticket_is_done(self, tier: Tier) -> None:
        entries = blocks.chain(1, 6)
        memory, batch = blocks.stored(entries)
        seen: list[int] = []
        ticket = tier.put(batch, deadline_s=WAIT_S, notify=lambda index, outcome: seen.append(index))
        assert ticket.wait(WAIT_S)
        assert sorted(seen) == list(range(6))
        seen.clear()
        memory, batch = blocks.room(entries)
        ticket = tier.get(batch, notify=lambda index, outcome: seen.append(index))
        assert ticket.wait(WAIT_S)
        assert sorted(seen) == list(range(6))
        del memory

    def test_a_deadline_in_the_past_is_late_and_reads_nothing(self, tier: Tier) -> None:
        entries = blocks.chain(1, 3)
        put(tier, entries)
        memory, batch = blocks.room(entries)
        ticket = tier.get(batch, deadline_s=-1.0)
        assert ticket.wait(WAIT_S)
        assert statuses(ticket.outcomes) == [Status.LATE] * 3
        assert all(memory.get(i) == b"\xee" * memory.num_bytes for i in range(3))
        assert statuses(get(tier, entries)) == [Status.HIT] * 3

    def test_it_stays_within_its_capacity_and_gives_up_the_least_recently_used_leaf(self, open_tier: Open) -> None:
        tier = open_tier(budget_bytes=16 << 20)
        held = [blocks.chain(seed, 8) for seed in range(40)]
        for entries in held:
            put(tier, entries)
        stats = tier.stats()
        assert 0 < stats.held_bytes <= stats.capacity_bytes == 16 << 20
        more = [blocks.chain(seed, 8) for seed in range(1000, 1140)]
        for entries in more:
            put(tier, entries)
            # The first prefix is used all the time.
            assert statuses(get(tier, held[0])) == [Status.HIT] * 8
            assert tier.stats().held_bytes <= 16 << 20
        assert tier.stats().evicted > 0
        for entries in held + more:
            found = tier.exists([e.id for e in entries])
            assert found == sorted(found, reverse=True), "a block is there without the one before it"
        tier.check()
        assert tier.close(WAIT_S)

    def test_higher_priorities_outlive_lower_ones(self, open_tier: Open) -> None:
        tier = open_tier(budget_bytes=16 << 20)
        dear = blocks.chain(1, 8, priority=80)
        put(tier, dear)
        for seed in range(10, 170):
            put(tier, blocks.chain(seed, 8))
        assert tier.stats().evicted > 0
        assert statuses(get(tier, dear)) == [Status.HIT] * 8
        assert tier.close(WAIT_S)

    def test_wrong_entries_raise_at_the_door(self) -> None:
        entry = blocks.chain(1, 1)[0]
        wrong: list[dict[str, object]] = [
            {"key": b"short"}, {"key": bytes(65)}, {"tokens": b""}, {"tokens": bytes(9)}, {"group": -1},
            {"group": 1 << 16}, {"priority": 101}, {"position": -1}, {"position": 1 << 63}, {"extras": bytes(65_537)},
        ]  # fmt: skip
        for fields in wrong:
            with pytest.raises(TierError, match="tier entry"):
                dataclasses.replace(entry, **fields)  # type: ignore[arg-type]

    def test_after_close_everything_is_a_miss_and_nothing_is_taken(self, open_tier: Open) -> None:
        tier = open_tier()
        entries = blocks.chain(1, 3)
        put(tier, entries)
        assert tier.close(WAIT_S)
        assert tier.close(WAIT_S)
        assert tier.exists([e.id for e in entries]) == [False] * 3
        assert statuses(get(tier, entries)) == [Status.MISS] * 3
        assert statuses(put(tier, entries)) == [Status.REFUSED] * 3

    def test_eight_threads_never_read_foreign_bytes(self, open_tier: Open) -> None:
        """Eight threads put, get and drop prefixes of their own and shared ones."""
        tier = open_tier(budget_bytes=16 << 20)
        seed = random.randrange(1 << 30)
        print("seed", seed)
        failures: list[BaseException] = []
        counts: list[int] = []

        def work(number: int) -> None:
            rng = random.Random(seed + number)
            hits = 0
            try:
                for _ in range(60):
                    entries = blocks.chain(rng.choice([number + 100, rng.randrange(12)]), 6, group=rng.randrange(3))
                    choice = rng.random()
                    if choice < 0.45:
                        put(tier, entries[: rng.randrange(1, 7)])
                    elif choice < 0.9:
                        hits += sum(outcome.ok for outcome in get(tier, entries, cuts=rng.choice([1, 3])))
                    else:
                        tier.drop([rng.choice(entries).id])
            except BaseException as error:
                failures.append(error)
            counts.append(hits)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        assert sum(counts) > 50, "hardly anything was read: the test shows nothing"
        tier.check()
        assert tier.close(WAIT_S)

    def test_identities_name_what_differs(self) -> None:
        other = Identity({**blocks.IDENTITY.parts, "model": "n", "rank": "0/2"})
        assert blocks.IDENTITY.differing(other) == ("model", "rank")
        assert blocks.IDENTITY.digest != other.digest
