"""Who is served when, what is kept for later, and what every request is charged."""

from __future__ import annotations

import pytest
from test_engine import NO_STOP, expected, make_engine, random_prompts

import kvpool as kv
from kvpool.engine import Params, Sampling
from kvpool.errors import KVError

pytestmark = pytest.mark.model


def charged(answer) -> bool:
    """Whether every computed row is accounted for."""
    a = answer
    return a.computed_tokens == a.prompt_tokens - a.cached_tokens + a.recomputed_tokens + len(a.token_ids) - 1


def finish(engine) -> dict[int, str]:
    """Run to the end; return how every request ended."""
    ends = {}
    while not engine.idle:
        ends |= {e.request: e.finish_reason for e in engine.step() if e.finish_reason}
    return ends


def test_every_row_is_charged_to_a_request_whatever_was_preempted(tiny_model, tokenizer):
    prefix, tails = random_prompts(1, 40, len(tokenizer))[0], random_prompts(6, 30, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=16 * 20)
    answers = engine.generate([prefix + tail for tail in tails], Params(max_new_tokens=50, stop_ids=NO_STOP))
    assert sum(a.num_preemptions for a in answers) > 0
    assert sum(a.recomputed_tokens for a in answers) > 0
    assert all(charged(a) for a in answers)
    assert sum(a.computed_tokens for a in answers) == engine.timing.prefill_tokens + engine.timing.decode_tokens
    stats = engine.cache.stats()
    assert stats.hit_tokens >= sum(a.cached_tokens for a in answers)


def test_with_a_tier_below_a_preempted_request_comes_back_instead_of_being_computed_again(tiny_model, tokenizer):
    prompts = random_prompts(6, 64, len(tokenizer))
    params = Params(max_new_tokens=60, stop_ids=NO_STOP)
    plain = make_engine(tiny_model, tokenizer, num_tokens=16 * 22)
    tiered = make_engine(tiny_model, tokenizer, num_tokens=16 * 22, host_size="64MiB")
    computed, restored = plain.generate(prompts, params), tiered.generate(prompts, params)
    assert [a.token_ids for a in restored] == [a.token_ids for a in computed]
    for answers in (computed, restored):
        assert sum(a.num_preemptions for a in answers) > 0
        assert all(charged(a) for a in answers)
    for answer in restored:  # only what no whole block holds is computed again: at most one block each time
        assert answer.recomputed_tokens <= 16 * answer.num_preemptions
    assert sum(a.recomputed_tokens for a in restored) < sum(a.recomputed_tokens for a in computed)
    assert tiered.cache.tier_stats()["host"].hit > 0
    tiered.cache.check()


def test_preempted_sampling_goes_on_with_its_own_numbers(tiny_model, tokenizer):
    prompts = random_prompts(4, 40, len(tokenizer))
    params = [
        Params(max_new_tokens=60, stop_ids=NO_STOP, sampling=Sampling(temperature=0.9, top_p=0.9, seed=i))
        for i in range(4)
    ]
    calm = make_engine(tiny_model, tokenizer, num_tokens=2048).generate(prompts, params)
    tight = make_engine(tiny_model, tokenizer, num_tokens=4 * 64).generate(prompts, params)
    assert sum(a.num_preemptions for a in tight) > 0
    assert [a.text for a in tight] == [a.text for a in calm]


@pytest.mark.parametrize("retention", [(), (kv.Retention(0, 64, priority=90),)])
def test_a_system_prompt_with_priority_outlives_the_flood(tiny_model, tokenizer, retention):
    system, *flood = random_prompts(9, 64, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=16 * 12)
    keep = Params(max_new_tokens=2, stop_ids=NO_STOP, retention=retention)
    engine.generate([[*system, 5]], keep)
    for prompt in flood:
        engine.generate([prompt], Params(max_new_tokens=2, stop_ids=NO_STOP))
    again = engine.generate([[*system, 6]], keep)[0]
    assert again.cached_tokens == (64 if retention else 0)


def test_decoding_goes_on_in_every_step_of_a_long_prefill(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=2048, max_step_tokens=32)
    short = [engine.add(p, Params(max_new_tokens=60, stop_ids=NO_STOP)) for p in random_prompts(3, 5, len(tokenizer))]
    engine.step()
    long = engine.add(random_prompts(1, 600, len(tokenizer))[0], Params(max_new_tokens=2, stop_ids=NO_STOP))
    for _ in range(15):
        assert sorted(e.request for e in engine.step()) == short
    assert finish(engine) == dict.fromkeys([*short, long], "length")


def test_nobody_of_equal_priority_overtakes_a_request_that_waits_for_room(tiny_model, tokenizer):
    big, *small = [random_prompts(1, n, len(tokenizer))[0] for n in (200, 20, 21, 22, 23)]
    engine = make_engine(tiny_model, tokenizer, num_tokens=16 * 14)
    params = Params(max_new_tokens=4, stop_ids=NO_STOP)
    running = engine.add(random_prompts(1, 64, len(tokenizer))[0], params)
    engine.step()
    waiting = engine.add(big, params)  # does not fit beside the one that runs
    later = [engine.add(prompt, params) for prompt in small]
    order = []
    while not engine.idle:
        order += [e.request for e in engine.step() if e.finish_reason]
    assert order[:2] == [running, waiting]
    assert sorted(order[2:]) == later


def test_the_lowest_priority_is_preempted_first_and_ends_last(tiny_model, tokenizer):
    prompts = random_prompts(3, 40, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=16 * 12)
    ids = [
        engine.add(p, Params(max_new_tokens=60, stop_ids=NO_STOP, priority=priority))
        for p, priority in zip(prompts, (0, 2, 1), strict=True)
    ]
    order = []
    while not engine.idle:
        order += [e.request for e in engine.step() if e.finish_reason]
    answers = [engine.answer(i) for i in ids]
    assert order == [ids[1], ids[2], ids[0]]
    assert answers[1].num_preemptions == 0
    assert answers[0].num_preemptions > 0
    assert [a.token_ids for a in answers] == [expected(tiny_model, p, 60) for p in prompts]


def test_an_abort_ends_a_request_wherever_it_is(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024, max_sequences=1, max_step_tokens=16)
    params = Params(max_new_tokens=5, stop_ids=NO_STOP)
    running, waiting, other = [engine.add(p, params) for p in random_prompts(3, 40, len(tokenizer))]
    engine.step()  # a chunk of the first one's prompt
    for request in (waiting, running):
        engine.abort(request)
        engine.abort(request)
    engine.abort(999)
    assert finish(engine) == {waiting: "abort", running: "abort", other: "length"}
    aborted = engine.answer(running)
    assert (aborted.computed_tokens, aborted.token_ids, aborted.time_to_first_token_s) == (16, [], None)
    assert engine.answer(waiting).waited_s is None
    assert charged(engine.answer(other))
    assert engine.cache.stats().used == 0


def test_a_deadline_passes_for_one_that_was_never_admitted(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=256, max_sequences=1)
    first, second = random_prompts(2, 10, len(tokenizer))
    running = engine.add(first, Params(max_new_tokens=100, stop_ids=NO_STOP))
    late = engine.add(second, Params(max_new_tokens=1, stop_ids=NO_STOP, deadline_s=1e-9))
    events = engine.step()
    assert [(e.request, e.finish_reason) for e in events if e.finish_reason] == [(late, "deadline")]
    assert finish(engine) == {running: "length"}


def test_a_request_waits_until_it_is_admitted_and_not_until_it_is_computed(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=256)
    now, forward = [0.0], engine._packed.forward
    engine._clock = lambda: now[0]

    def slow(step):
        now[0] += 5.0
        return forward(step)

    engine._packed.forward = slow
    request = engine.add([5, 6, 7], Params(max_new_tokens=1, stop_ids=NO_STOP))
    now[0] = 2.0
    finish(engine)
    answer = engine.answer(request)
    assert (answer.waited_s, answer.time_to_first_token_s) == (2.0, 7.0)


def test_wrong_use_is_told_apart(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=256)
    with pytest.raises(KVError, match="one string"):
        engine.generate("hello")
    with pytest.raises(KVError, match="2 prompts but 1 params"):
        engine.generate([[5], [6]], [Params()])
    with pytest.raises(KVError, match="no tokens"):
        engine.add([])
    request = engine.add([5, 6], Params(max_new_tokens=3, stop_ids=NO_STOP))
    with pytest.raises(KVError, match="still running"):
        engine.answer(request)
    finish(engine)
    engine.answer(request)
    with pytest.raises(KVError, match="unknown"):
        engine.answer(request)
    with pytest.raises(KVError, match="max_new_tokens"):
        Params(max_new_tokens=0)
    with pytest.raises(KVError, match="deadline_s"):
        Params(deadline_s=0)


def test_the_log_says_what_the_answer_says(tiny_model, tokenizer, caplog):
    engine = make_engine(tiny_model, tokenizer, num_tokens=256)
    with caplog.at_level("INFO", logger="kvpool.engine"):
        answer = engine.generate([[5, 6, 7]], Params(max_new_tokens=3, stop_ids=NO_STOP))[0]
    (record,) = [r for r in caplog.records if r.getMessage() == "request"]
    fields = record.kvpool_fields
    assert (fields["prompt"], fields["cached"], fields["computed"], fields["generated"]) == (3, 0, 5, 3)
    assert fields["first_token_ms"] == pytest.approx(1e3 * answer.time_to_first_token_s, abs=1e-3)
