"""What `fits` promised is gone when the step is opened: others use the cache too. The engine makes room and goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_engine import NO_STOP, expected, random_prompts
from test_scheduling import charged, finish

import kvpool as kv
from kvpool.engine import Engine, Params

pytestmark = pytest.mark.model
BLOCK = 16


class SharedCache(kv.KVCache):
    """A cache somebody else uses as well: `intrude` runs after `fits`, right before a step is opened."""

    intrude: Callable[[], None] | None = None
    num_broken = 0

    def step(self, *args, **kwargs):
        if self.intrude is not None:
            self.intrude()
        try:
            return super().step(*args, **kwargs)
        except kv.OutOfBlocks:
            self.num_broken += 1
            raise


def make_engine(model, tokenizer, num_blocks: int, **settings) -> tuple[Engine, SharedCache]:
    plan = kv.make_plan(
        kv.CacheSpec.from_config(model.config),
        num_blocks=num_blocks,
        codec="fp32",
        tokens_per_block=BLOCK,
        max_seq_len=2048,
        **{"max_sequences": 16, "max_step_tokens": 512, **settings},
    )
    cache = SharedCache(plan)
    return Engine(model, tokenizer, plan, cache=cache), cache


def intrude(cache: SharedCache, call: int, take: Callable[[], Callable[[], None]], give_back: int) -> list[str]:
    """Take room as the `call`th step is opened, and give it back later."""
    log: list[str] = []
    calls, release = 0, None

    def one_call() -> None:
        nonlocal calls, release
        calls += 1
        if not log and calls == call:
            cache.intrude = None  # what takes room opens a step itself
            release = take()
            cache.intrude = one_call
            log.append("taken")
        elif len(log) == 1 and calls >= call + give_back:
            release()
            log.append("given back")

    cache.intrude = one_call
    return log


def hold_a_sequence(cache: SharedCache, num_blocks: int) -> Callable[[], Callable[[], None]]:
    def take() -> Callable[[], None]:
        holder = cache.sequence(foreign(num_blocks))
        with cache.step([(holder, num_blocks * BLOCK)]):
            pass
        return lambda: holder.release(keep=False)

    return take


def pin_a_prefix(cache: SharedCache, num_blocks: int) -> Callable[[], Callable[[], None]]:
    """What is cached counts as room; pinned it is none."""
    tokens = foreign(num_blocks)
    with cache.sequence(tokens) as seq, cache.step([(seq, len(tokens))]):
        pass

    def take() -> Callable[[], None]:
        pin = cache.pin(tokens)
        return lambda: cache.unpin(pin)

    return take


def shrink(cache: SharedCache, num_blocks: int) -> Callable[[], Callable[[], None]]:
    """Memory goes back to the system, from the end; it does not come back."""

    def take() -> Callable[[], None]:
        group = cache.plan.groups[0]
        cache.resize((group.num_blocks - num_blocks) * group.bytes_per_block)
        return lambda: None

    return take


def foreign(num_blocks: int) -> list[int]:
    return random_prompts(1, num_blocks * BLOCK, 999)[0]


WAYS = {"sequence": hold_a_sequence, "pin": pin_a_prefix, "resize": shrink}


#: Three prompts of 60 tokens are admitted by step 1 and need a block more each at steps 6 and 22.
NEWCOMERS, RUNNING, LATER = (1, 16), (6, 12), (22, 9)


def serve_three(model, tokenizer, how: str, call: int, num_blocks: int) -> None:
    prompts = random_prompts(3, 60, len(tokenizer))
    engine, cache = make_engine(model, tokenizer, 24)
    log = intrude(cache, call, WAYS[how](cache, num_blocks), give_back=12)
    answers = engine.generate(prompts, Params(max_new_tokens=32, stop_ids=NO_STOP))
    assert log[:1] == ["taken"]
    assert cache.num_broken > 0, "the promise was kept: the test shows nothing"
    assert [a.token_ids for a in answers] == [expected(model, p, 32) for p in prompts]
    assert all(charged(a) for a in answers)
    assert (answers[2].num_preemptions > 0) == (call > 1)
    cache.check()
    stats = cache.stats()
    assert (stats.used, stats.free + stats.cached) == (0, stats.committed)


@pytest.mark.parametrize("how", WAYS)
def test_newcomers_that_were_promised_room_wait_for_it(tiny_model, tokenizer, how) -> None:
    serve_three(tiny_model, tokenizer, how, *NEWCOMERS)


@pytest.mark.parametrize("when", [RUNNING, LATER], ids=["at once", "later"])
def test_who_runs_and_finds_the_promised_room_pinned_loses_no_token(tiny_model, tokenizer, when) -> None:
    serve_three(tiny_model, tokenizer, "pin", *when)


@pytest.mark.parametrize("when", [RUNNING, LATER], ids=["at once", "later"])
@pytest.mark.parametrize("how", ["sequence", "resize"])
def test_who_runs_and_finds_the_promised_room_gone_between_two_steps_loses_no_token(
    tiny_model, tokenizer, how, when
) -> None:
    """With a step always open nobody else opens one, and a resize waits: not for two in flight."""
    serve_three(tiny_model, tokenizer, how, *when)


@pytest.mark.parametrize("how", WAYS)
def test_one_that_finds_no_room_even_alone_ends_with_the_numbers_and_the_others_go_on(
    tiny_model, tokenizer, how
) -> None:
    long, *short = (random_prompts(1, n, len(tokenizer))[0] for n in (150, 20, 21))
    engine, cache = make_engine(tiny_model, tokenizer, 16)
    log = intrude(cache, 1, WAYS[how](cache, 10), give_back=1 << 30)
    ids = [engine.add(p, Params(max_new_tokens=8, stop_ids=NO_STOP)) for p in (long, *short)]
    ends = finish(engine)
    assert log == ["taken"]
    assert ends == dict(zip(ids, ["error", "length", "length"], strict=True))
    first, *others = [engine.answer(i) for i in ids]
    assert "needs 10 blocks" in first.error
    assert "nothing else runs" in first.error
    assert (first.token_ids, first.computed_tokens) == ([], 0)
    assert [a.token_ids for a in others] == [expected(tiny_model, p, 8) for p in short]
    cache.check()


def test_one_that_waits_and_never_fits_does_not_keep_the_engine_busy_for_ever(tiny_model, tokenizer) -> None:
    """It fitted when it was added; memory has gone since, and nothing runs whose end would bring room."""
    engine, cache = make_engine(tiny_model, tokenizer, 16)
    request = engine.add(random_prompts(1, 150, len(tokenizer))[0], Params(max_new_tokens=8, stop_ids=NO_STOP))
    shrink(cache, 10)()
    for _ in range(3):
        engine.step()
    assert engine.idle
    assert "needs 10 blocks" in engine.answer(request).error
    cache.check()
