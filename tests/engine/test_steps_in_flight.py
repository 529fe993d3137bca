"""Everything the engine promises holds with two steps in flight, and some things only then."""

from __future__ import annotations

import threading

import pytest
import test_broken_promises
import test_engine
import test_scheduling
from test_engine import NO_STOP, expected, make_engine, random_prompts
from test_scheduling import finish

import kvpool as kv
from kvpool.engine import Engine, Params
from kvpool.errors import KVError

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def two_in_flight(monkeypatch):
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "steps_in_flight", 2)


NOT_FOR_TWO = ("tier_below", "detokenizer", "between_two_steps")
#: Those of one step in flight, again.
for module in (test_engine, test_scheduling, test_broken_promises):
    for name, test in vars(module).items():
        if name.startswith("test_") and not any(word in name for word in NOT_FOR_TWO):
            globals()[name] = test


def test_the_next_step_is_planned_while_a_pass_runs(tiny_model, tokenizer):
    """Every pass but the last waits until a later step was opened: with one in flight it would wait for ever."""
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024)
    planned, forward = threading.Semaphore(0), engine._packed.forward
    opened, step, waited = [], engine.cache.step, []

    def opening(*args, **kwargs):
        opened.append(step(*args, **kwargs))
        if len(opened) > 1:
            planned.release()
        return opened[-1]

    def waiting(at):
        if len(waited) < 7:
            waited.append(planned.acquire(timeout=30))
        return forward(at)

    engine.cache.step, engine._packed.forward = opening, waiting
    prompts = random_prompts(3, 20, len(tokenizer))
    answers = engine.generate(prompts, Params(max_new_tokens=8, stop_ids=NO_STOP))
    assert waited == [True] * 7
    assert len(opened) == 8  # nothing was computed that nobody asked for
    assert [a.token_ids for a in answers] == [expected(tiny_model, p, 8) for p in prompts]


def test_a_request_that_stops_is_not_charged_for_what_was_computed_ahead(tiny_model, tokenizer):
    prompts = random_prompts(3, 20, len(tokenizer))
    full = [expected(tiny_model, p, 12) for p in prompts]
    stop = full[0][5]
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024)
    answers = engine.generate(prompts, Params(max_new_tokens=12, stop_ids=frozenset([stop])))
    assert [a.token_ids for a in answers] == [row[: row.index(stop) + 1] if stop in row else row for row in full]
    assert answers[0].finish_reason == "stop"
    assert all(a.computed_tokens == 20 + len(a.token_ids) - 1 for a in answers)
    assert engine.idle
    assert engine.cache.stats().used == 0
    engine.cache.check()
    assert engine.cache.peek([*prompts[0], *answers[0].token_ids, 7]) == 20 + len(answers[0].token_ids)


def test_a_pass_that_fails_undoes_both_steps_and_the_engine_goes_on(tiny_model, tokenizer):
    prompts = random_prompts(3, 20, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024)
    forward, calls = engine._packed.forward, []

    def failing(step):
        calls.append(step)
        if len(calls) == 4:
            raise ZeroDivisionError
        return forward(step)

    engine._packed.forward = failing
    ids = [engine.add(p, Params(max_new_tokens=10, stop_ids=NO_STOP)) for p in prompts]
    with pytest.raises(ZeroDivisionError):
        finish(engine)
    assert len(calls) == 4  # the step behind it was not run
    engine.cache.check()
    finish(engine)
    assert [engine.answer(i).token_ids for i in ids] == [expected(tiny_model, p, 10) for p in prompts]
    assert engine.cache.stats().used == 0


def test_a_resize_comes_to_its_turn_while_requests_run(tiny_model, tokenizer):
    prompts = random_prompts(3, 40, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=2048)
    ids = [engine.add(p, Params(max_new_tokens=30, stop_ids=NO_STOP)) for p in prompts]
    engine.step()
    assert engine.cache.resize(engine.cache.plan.budget_bytes // 2).waiting
    for _ in range(3):
        engine.step()
    assert engine.cache.resized is not None
    finish(engine)
    assert [engine.answer(i).token_ids for i in ids] == [expected(tiny_model, p, 30) for p in prompts]
    engine.cache.check()


def test_an_abort_of_the_last_request_waits_for_its_steps(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024)
    request = engine.add(random_prompts(1, 20, len(tokenizer))[0], Params(max_new_tokens=10, stop_ids=NO_STOP))
    engine.step()
    assert engine.cache.stats().used > 0
    engine.abort(request)
    assert engine.cache.stats().used == 0
    assert [e.finish_reason for e in engine.step()][-1] == "abort"
    assert engine.idle
    assert engine.answer(request).computed_tokens == 20


def test_how_many_steps_may_be_in_flight_is_said_at_once(tiny_model, tokenizer):
    plan = kv.make_plan(kv.CacheSpec.from_config(tiny_model.config), num_blocks=64, codec="fp32", max_seq_len=512)
    with pytest.raises(KVError, match="must be 1 or 2, got 3"):
        Engine(tiny_model, tokenizer, plan, steps_in_flight=3)
    with pytest.raises(KVError, match="without tiers"):
        make_engine(tiny_model, tokenizer, num_tokens=256, host_size="1MiB")
    assert Engine(tiny_model, tokenizer, plan, steps_in_flight=None).steps_in_flight == 1
