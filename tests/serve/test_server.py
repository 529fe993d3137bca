"""The server as clients see it, over real sockets with the real `openai` client."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import re
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch
from running import GREEDY, NAME, Running

import kvpool as kv
from kvpool.engine import Engine, Params

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def running(tiny_model, tokenizer):
    server = Running(tiny_model, tokenizer)
    yield server
    server.stop()


def expected(model, tokenizer, ids, count):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM(copy.deepcopy(model.config))  # its attention implementation is its own
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    ids = torch.tensor([ids])
    out = plain.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_completion_is_the_text_of_transformers_and_counts_its_tokens(running, tiny_model, tokenizer):
    prompt = "A cache remembers what was"
    ids = tokenizer(prompt).input_ids
    reply = running.client().completions.create(prompt=prompt, max_tokens=12, **GREEDY)
    assert reply.choices[0].text == expected(tiny_model, tokenizer, ids, 12)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 12)


def test_a_stream_gives_the_same_text_in_pieces_and_usage_at_its_end(running):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say: 你好 🙂 שלום"}]
    whole = running.client().chat.completions.create(messages=messages, max_tokens=24, **GREEDY)
    pieces, counts = [], None
    for chunk in running.client().chat.completions.create(
        messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        counts = chunk.usage or counts
        pieces += [c.delta.content or "" for c in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert counts.completion_tokens == 24
    assert counts.prompt_tokens_details.cached_tokens > 0  # the first call had computed the prompt


def test_keys_with_different_salts_never_share_a_block(running):
    ids = list(range(500, 600))
    cached = []
    for key in ("alice", "alice", "bob", "bob"):
        reply = running.client(key).completions.create(prompt=ids, max_tokens=1, **GREEDY)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 99, 0, 99]


def test_many_clients_at_once_each_get_their_own_answer(running, tiny_model, tokenizer):
    prompts = [list(range(100 + 7 * i, 110 + 9 * i)) for i in range(24)]

    def ask(ids):
        return running.client().completions.create(prompt=ids, max_tokens=8, **GREEDY).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, prompts))
    for index in (0, 11, 23):
        assert texts[index] == expected(tiny_model, tokenizer, prompts[index], 8)
    assert running.idle()


def test_a_client_that_leaves_frees_its_blocks_and_disturbs_nobody(running):
    body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 900, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    assert running.idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + "/v1/completions", json={**body, "stream": False}, timeout=0.3)
    assert running.idle()
    assert running.client().completions.create(prompt=[9], max_tokens=2, **GREEDY).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "temperature": 3}, "temperature", "0 to 2"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "'hot'"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "1 to"),
        ({"prompt": "x", "max_tokens": 100000}, "max_tokens", "100000"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop", "none empty"),
        ({"prompt": "x", "n": 9}, "n", "1 to 8"),
        ({"prompt": "x", "logprobs": 5}, "logprobs", "not supported"),
        ({"prompt": []}, "prompt", "token ids"),
        ({"prompt": [10**7]}, "prompt", "token ids below"),
        ({"prompt": list(range(100, 2100))}, "prompt", "2000 tokens"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({}, "prompt", "must be"),
        ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
    ],
)
def test_a_bad_request_gets_its_own_400(running, body, param, words):
    response = running.post("/v1/completions", json={"model": NAME, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{", 400, "no JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"model": "other", "prompt": "x"}', 404, "'tiny' is"),
        (b"\xff\xfe", 400, "no JSON"),
        (b"[" * 100000, 400, "no JSON"),
        (b'"' + b"x" * (9 << 20) + b'"', 413, "exceeds"),
    ],
)
def test_a_hostile_body_is_refused_clearly(running, content, status, words):
    response = running.post("/v1/completions", content=content)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [[], "hi", [{"role": "robot", "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user"}], [5]],
)
def test_bad_messages_are_refused_clearly(running, messages):
    response = running.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_unknown_paths_and_methods_are_clear(running):
    assert httpx.get(running.url + "/v2").status_code == 404
    assert httpx.get(running.url + "/v1/completions").status_code == 405


def test_health_models_and_metrics(running):
    assert httpx.get(running.url + "/health").json() == {"status": "ok"}
    assert [m.id for m in running.client().models.list()] == [NAME]
    assert running.client().models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        running.client().models.retrieve("other/model")
    running.client().completions.create(prompt=[3, 4, 5], max_tokens=2, **GREEDY)
    text = httpx.get(running.url + "/metrics").text
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    assert values["kvpool:generation_tokens_total"] >= 2
    assert values["kvpool:prefix_cache_queries_total"] >= 3
    blocks = [values[f'kvpool:blocks{{group="full",state="{state}"}}'] for state in ("used", "cached", "free")]
    assert sum(blocks) == 256


def test_the_metrics_are_those_of_the_docs(running):
    text = httpx.get(running.url + "/metrics").text
    shown = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")}
    shown = {name for name in shown if not name.endswith("_created")}
    table = (ROOT / "docs" / "engine.md").read_text().split("| metric | what |")[1].split("\n\n")[0]
    named = {f"kvpool:{name}" for row in table.splitlines() for name in re.findall(r"`(\w+)", row.rpartition("|")[0])}
    assert shown == named


def test_several_answers_a_prompt_differ_only_in_index(running):
    reply = running.client().completions.create(prompt=["one", "two"], n=2, max_tokens=3, **GREEDY)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text == reply.choices[1].text


def test_a_full_queue_answers_429_and_what_waits_is_served(tiny_model, tokenizer):
    server = Running(tiny_model, tokenizer, max_sequences=1, max_waiting=1)
    hold = threading.Event()
    body = {"model": NAME, "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
    try:
        server.worker._inbox.put(hold.wait)  # the engine's thread does nothing until it is set
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(server.post, "/v1/completions", json=body) for _ in range(2)]
            while server.worker.num_open < 2:
                time.sleep(0.01)
            refused = server.post("/v1/completions", json=body)
            hold.set()
            answered = [future.result() for future in waiting]
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert [reply.json()["usage"]["completion_tokens"] for reply in answered] == [4, 4]
        assert server.idle()
    finally:
        hold.set()
        server.stop()


def test_a_deadline_ends_an_answer_and_a_stop_ends_the_server(tiny_model, tokenizer):
    server = Running(tiny_model, tokenizer, request_timeout_s=0.5, drain_s=0.2)
    reply = server.client().completions.create(prompt=[5, 6], max_tokens=1000, **GREEDY)
    assert reply.usage.completion_tokens < 1000
    assert reply.choices[0].finish_reason == "length"
    server.stop()
    assert not server.worker.alive
    assert server.engine.cache.stats().used == 0


def test_a_thread_of_its_own_is_not_needed_for_the_engine(tiny_model, tokenizer):
    """The same engine answers from Python; the server adds nothing to it."""
    spec = kv.CacheSpec.from_config(tiny_model.config)
    engine = Engine(tiny_model, tokenizer, kv.make_plan(spec, num_blocks=32, codec="fp32", max_seq_len=256))
    answer = engine.generate(["hello"], Params(max_new_tokens=3, stop_ids=frozenset()))[0]
    assert len(answer.token_ids) == 3
    json.dumps(answer.text)
