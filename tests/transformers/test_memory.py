"""What a sequence holds is what its plan says, for every family; windows hold no more however long it gets."""

from __future__ import annotations

import pytest
from tiny_models import tiny

import kvpool as kv
from kvpool.ledger import Ledger, StepArrays
from kvpool.support import families

LENGTH = 10_000


def hold(plan: kv.Plan, length: int, chunk: int) -> Ledger:
    """Compute one sequence of distinct tokens in chunks, integers only, and keep it."""
    ledger, arrays = Ledger(plan), StepArrays.from_plan(plan)
    sequence = ledger.open([i % 50_000 for i in range(length)])
    done = 0
    while done < length:
        decision = ledger.begin_step([(sequence, min(chunk, length - done))], arrays)
        done += decision.total_tokens
        ledger.end_step(decision)
    return ledger


@pytest.mark.parametrize("family", [f.name for f in families() if f.mode != "refused"])
def test_a_sequence_of_ten_thousand_tokens_holds_what_the_plan_says(family: str) -> None:
    config = tiny(family).config
    config.max_position_embeddings = config.n_positions = 16_384
    spec = kv.CacheSpec.from_config(config)
    plan = kv.make_plan(spec, budget="2GiB", max_step_tokens=1024, max_seq_len=16_384, checkpoint_interval=16_384)
    stats = hold(plan, LENGTH, 1024).stats()
    for group, found in zip(plan.groups, stats.groups, strict=True):
        planned = group.blocks_for(LENGTH)
        assert abs(found.used - planned) <= 1, f"{group.name}: {found.used} blocks held, planned {planned}"
        assert found.used * group.bytes_per_block <= (planned + 1) * group.bytes_per_block


def test_a_window_of_a_hundred_thousand_tokens_holds_a_constant_number_of_blocks() -> None:
    spec = kv.CacheSpec.from_config(tiny("mistral_windows", sliding_window=1000).config)
    plan = kv.make_plan(spec, budget="64MiB", max_step_tokens=1024, max_seq_len=131_072, tokens_per_block=16)
    (_group,) = plan.groups
    held = {length: hold(plan, length, 1024).stats().groups[0].used for length in (2_000, 10_000, 100_000)}
    assert max(held.values()) <= -(-999 // 16) + 1
    assert max(held.values()) - min(held.values()) <= 1


@pytest.mark.parametrize(("num_others", "num_blocks"), [(0, 8000), (3, 8000), (3, 2100)])
def test_two_chats_that_share_half_find_it_behind_a_window(num_others: int, num_blocks: int) -> None:
    """4,000 tokens each, the first 2,000 shared, a window of 1,000; other chats between them need the blocks."""
    spec = kv.CacheSpec.from_config(tiny("gemma2", sliding_window=1000, max_position_embeddings=8192).config)
    plan = kv.make_plan(
        spec,
        num_blocks={"full": num_blocks, "window-1000": num_blocks},
        tokens_per_block=8,
        max_step_tokens=512,
        max_seq_len=8192,
        checkpoint_interval=1000,
    )
    ledger, arrays = Ledger(plan), StepArrays.from_plan(plan)
    system = list(range(2000))
    chats = [system + list(range(10_000 * i, 10_000 * i + 2000)) for i in (1, 2)]
    others = [list(range(10_000 * i, 10_000 * i + 4000)) for i in range(3, 3 + num_others)]
    for tokens in (chats[0], *others, chats[1]):
        sequence = ledger.open(tokens)
        while ledger.num_computed_tokens(sequence) < len(tokens):
            ledger.end_step(ledger.begin_step([(sequence, 512)], arrays))
        found = ledger.num_cached_tokens(sequence)
        ledger.release(sequence)
    assert found == 2000
    # 2,250 blocks of 8 tokens are different ones: with 2,100 some had to go.
    assert (ledger.stats().evicted_blocks > 0) == (num_blocks < 2250)
    ledger.check()
