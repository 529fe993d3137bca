"""Continuous batching: right tokens under pressure, clear ends, text that is never torn."""

from __future__ import annotations

import pytest
import torch

import kvpool as kv
from kvpool.engine import Engine, Params, Sampling
from kvpool.engine.detokenizer import Detokenizer

pytestmark = pytest.mark.model  # the tokenizer is the embedded model's


def make_engine(model, tokenizer, *, num_tokens: int, host_size: str | None = None, **settings):
    plan = kv.make_plan(
        kv.CacheSpec.from_config(model.config),
        num_blocks=num_tokens // 16,
        codec="fp32",
        tokens_per_block=16,
        max_seq_len=2048,
        **{"max_sequences": 16, "max_step_tokens": 512, **settings},
    )
    return Engine(model, tokenizer, plan, cache=kv.KVCache(plan, host_size=host_size))


def expected(model, prompt, new_tokens):
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def random_prompts(count, length, vocabulary):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


NO_STOP: frozenset[int] = frozenset()


def test_room_for_a_thousand_tokens_serves_eight_prompts_of_six_hundred(tiny_model, tokenizer):
    prompts = random_prompts(8, 600, len(tokenizer))
    want = [expected(tiny_model, p, 8) for p in prompts]
    engine = make_engine(tiny_model, tokenizer, num_tokens=1008)
    answers = engine.generate(prompts, Params(max_new_tokens=8, stop_ids=NO_STOP))
    assert [a.token_ids for a in answers] == want
    engine.cache.check()
    assert engine.cache.stats().used == 0


def test_a_preempted_request_gives_the_same_tokens(tiny_model, tokenizer):
    prompts = random_prompts(4, 40, len(tokenizer))
    want = [expected(tiny_model, p, 60) for p in prompts]
    engine = make_engine(tiny_model, tokenizer, num_tokens=4 * 64)
    answers = engine.generate(prompts, Params(max_new_tokens=60, stop_ids=NO_STOP))
    assert sum(a.num_preemptions for a in answers) > 0
    assert [a.token_ids for a in answers] == want
    engine.cache.check()


def test_a_prompt_that_can_never_fit_fails_at_once_and_the_others_go_on(tiny_model, tokenizer):
    short, long = random_prompts(1, 20, len(tokenizer))[0], random_prompts(1, 700, len(tokenizer))[0]
    engine = make_engine(tiny_model, tokenizer, num_tokens=320)
    first, second = engine.generate([long, short], Params(max_new_tokens=4, stop_ids=NO_STOP))
    assert first.finish_reason == "error"
    assert "44" in first.error  # the blocks it needs
    assert not first.token_ids
    assert second.token_ids == expected(tiny_model, short, 4)


def test_chunks_of_a_long_prompt_share_steps_with_decoding(tiny_model, tokenizer):
    prompts = random_prompts(3, 300, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=2048, max_step_tokens=64)
    answers = engine.generate(prompts, Params(max_new_tokens=6, stop_ids=NO_STOP))
    assert [a.token_ids for a in answers] == [expected(tiny_model, p, 6) for p in prompts]
    assert [a.computed_tokens for a in answers] == [305] * 3


def test_a_shared_prefix_is_computed_once_and_counted(tiny_model, tokenizer):
    prefix, tails = random_prompts(1, 160, len(tokenizer))[0], random_prompts(3, 9, len(tokenizer))
    engine = make_engine(tiny_model, tokenizer, num_tokens=2048)
    answers = engine.generate([prefix + tail for tail in tails], Params(max_new_tokens=2, stop_ids=NO_STOP))
    assert [a.cached_tokens for a in answers] == [0, 160, 160]
    assert sum(a.computed_tokens for a in answers) == 169 + 9 + 9 + 3


def test_events_carry_the_text_of_the_answer(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024)
    prompts = random_prompts(3, 12, len(tokenizer))
    texts, ends = {}, {}
    for event in engine.stream(prompts, Params(max_new_tokens=20, stop_ids=NO_STOP)):
        texts[event.request] = texts.get(event.request, "") + event.text
        if event.finish_reason:
            ends[event.request] = event.finish_reason
    assert set(ends.values()) == {"length"}
    for request, text in texts.items():
        answer = engine.answer(request)
        assert text == answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.time_to_first_token_s > 0


def test_leaving_a_stream_early_gives_every_block_back(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024)
    stream = engine.stream(random_prompts(3, 12, len(tokenizer)), Params(max_new_tokens=20, stop_ids=NO_STOP))
    next(stream)
    stream.close()
    assert engine.cache.stats().used == 0


def test_higher_priority_is_served_first(tiny_model, tokenizer):
    engine = make_engine(tiny_model, tokenizer, num_tokens=1024, max_sequences=1)
    prompts = random_prompts(3, 12, len(tokenizer))
    ids = [
        engine.add(p, Params(max_new_tokens=2, stop_ids=NO_STOP, priority=priority))
        for p, priority in zip(prompts, (0, 5, 1), strict=True)
    ]
    order = []
    while not engine.idle:
        order += [e.request for e in engine.step() if e.finish_reason]
    assert order == [ids[1], ids[2], ids[0]]


def test_a_deadline_ends_a_request_and_frees_its_blocks(tiny_model, tokenizer):
    now = 0.0
    plan = kv.make_plan(kv.CacheSpec.from_config(tiny_model.config), num_blocks=64, codec="fp32", max_seq_len=512)
    engine = Engine(tiny_model, tokenizer, plan, clock=lambda: now)
    request = engine.add([5, 6, 7], Params(max_new_tokens=50, stop_ids=NO_STOP, deadline_s=10.0))
    engine.step()
    now = 11.0
    events = engine.step()
    assert [e.finish_reason for e in events] == ["deadline"]
    assert len(engine.answer(request).token_ids) == 1
    assert engine.cache.stats().used == 0


def test_sampling_depends_on_the_seed_and_not_on_the_batch(tiny_model, tokenizer):
    prompt, *others = random_prompts(4, 12, len(tokenizer))
    params = Params(
        max_new_tokens=12, stop_ids=NO_STOP, sampling=Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=3)
    )
    alone = make_engine(tiny_model, tokenizer, num_tokens=1024).generate([prompt], params)[0].token_ids
    together = make_engine(tiny_model, tokenizer, num_tokens=1024).generate([*others, prompt], params)[-1].token_ids
    other_seed = Params(max_new_tokens=12, stop_ids=NO_STOP, sampling=Sampling(temperature=0.8, seed=4))
    assert alone == together
    assert alone != make_engine(tiny_model, tokenizer, num_tokens=1024).generate([prompt], other_seed)[0].token_ids


def test_the_attention_a_model_is_set_to_elsewhere_does_not_matter(tiny_model, tokenizer):
    params = Params(max_new_tokens=6, stop_ids=NO_STOP)
    engine = make_engine(tiny_model, tokenizer, num_tokens=256)
    want = engine.generate([[5, 6, 7]], params)[0].token_ids
    tiny_model.set_attn_implementation("sdpa")
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == want
    assert tiny_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("text", ["naïve café 你好世界 🙂👩‍👩‍👧", "שלום नमस्ते ありがとう", "a\nb  c\t\u00a0d"])
def test_text_of_any_language_streams_without_broken_characters(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_stop_text_is_cut_off_even_when_tokens_tear_it(tokenizer):
    ids = tokenizer("one two END three", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer, ("END",))
    streamed = ""
    for token in ids:
        streamed += detokenizer.push(token)
        if detokenizer.stopped:
            break
    assert streamed + detokenizer.finish() == detokenizer.text == "one two "
