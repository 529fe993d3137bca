"""A server that stops, or whose engine fails: what open requests get, and what those get that come later."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from running import GREEDY, NAME, Running
from test_hostile_clients import send

pytestmark = pytest.mark.model

BODY = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 1000}


@contextlib.contextmanager
def server(model, tokenizer, **settings):
    running = Running(model, tokenizer, **settings)
    try:
        yield running
    finally:
        running.stop()


def slow_down(running: Running, seconds: float) -> None:
    """Let every forward pass take so long."""
    forward = running.engine._packed.forward

    def slow(step):
        time.sleep(seconds)
        return forward(step)

    running.engine._packed.forward = slow


def frames(response: httpx.Response) -> list[dict]:
    """Read a stream to its proper end."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stop_gives_open_requests_their_time(tiny_model, tokenizer):
    with server(tiny_model, tokenizer, drain_s=20.0) as running:
        want = running.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        slow_down(running, 0.05)
        with httpx.stream("POST", running.url + "/v1/completions", json={**BODY, "stream": True}, timeout=60) as reply:
            first = next(lines := reply.iter_lines())
            running.server.should_exit = True
            rest = [line.removeprefix("data: ") for line in [first, *lines] if line]
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert rest[-1] == "[DONE]"
        chunks = [json.loads(line)["choices"][0] for line in rest[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == want
        assert chunks[-1]["finish_reason"] == "length"
        assert running.engine.cache.stats().used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_what_takes_longer_with_what_it_has(tiny_model, tokenizer, stream):
    with server(tiny_model, tokenizer, drain_s=0.3) as running:
        slow_down(running, 0.02)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:

            def ask() -> tuple[int, str]:
                with httpx.stream(
                    "POST", running.url + "/v1/completions", json={**ENDLESS, "stream": stream}, timeout=60
                ) as reply:
                    if stream:
                        return reply.status_code, "".join(f["choices"][0]["text"] for f in frames(reply))
                    reply.read()
                    return reply.status_code, reply.json()["choices"][0]["text"]

            asked = pool.submit(ask)
            while not running.engine.timing.decode_tokens:
                time.sleep(0.01)
            begun = time.monotonic()
            running.server.should_exit = True
            status, text = asked.result(20)
            assert time.monotonic() - begun < 10, "a thousand tokens take 20 s"
        assert (status, bool(text)) == (200, True)
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert not running.worker.alive
        assert running.engine.cache.stats().used == 0


def test_a_reader_that_takes_nothing_does_not_keep_a_stop_from_ending(tiny_model, tokenizer, monkeypatch):
    monkeypatch.setattr("kvpool.serve.listener.LAST_WORDS_S", 0.5)
    with server(tiny_model, tokenizer, drain_s=0.3) as running:
        running.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with contextlib.ExitStack() as stack:
            stack.enter_context(send(running, {**ENDLESS, "n": 8, "stream": True}))
            stuck = time.monotonic() + 20
            while running.engine.timing.decode_tokens < 700 and time.monotonic() < stuck:
                time.sleep(0.01)
            begun = time.monotonic()
            running.server.should_exit = True
            running.thread.join(30)
            assert not running.thread.is_alive()
            assert time.monotonic() - begun < 10
        assert running.engine.cache.stats().used == 0


def test_who_asks_a_stopping_server_is_told_to_come_back(tiny_model, tokenizer):
    with server(tiny_model, tokenizer) as running:
        running.app.stopping = True
        reply = running.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "takes no more requests" in reply.json()["error"]["message"]
        assert httpx.get(running.url + "/health").status_code == 503
        running.app.stopping = False


def test_a_failed_engine_is_the_server_s_fault_and_health_says_so(tiny_model, tokenizer):
    with server(tiny_model, tokenizer) as running:
        fail, forward = threading.Event(), running.engine._packed.forward

        def failing(step):
            if fail.is_set():
                raise ZeroDivisionError("the model broke")
            time.sleep(0.01)
            return forward(step)

        running.engine._packed.forward = failing
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            httpx.stream(
                "POST", running.url + "/v1/completions", json={**ENDLESS, "stream": True}, timeout=60
            ) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            whole = pool.submit(running.post, "/v1/completions", json=ENDLESS)
            while running.worker.num_open < 2:
                time.sleep(0.01)
            fail.set()
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
            answered = whole.result(20)
        assert (answered.status_code, answered.json()["error"]["type"]) == (500, "server_error")
        assert (last["error"]["code"], last["error"]["message"]) == (500, "the model broke")
        health = httpx.get(running.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed: the model broke")
        later = running.post("/v1/completions", json=BODY)
        assert (later.status_code, later.json()["error"]["type"]) == (503, "server_error")
        assert "the model broke" in later.json()["error"]["message"]


def test_one_that_finds_no_room_gets_its_own_error_and_the_server_goes_on(tiny_model, tokenizer):
    with server(tiny_model, tokenizer) as running:
        cache, taken = running.engine.cache, threading.Event()

        def shrink() -> None:
            cache.resize(40 * cache.plan.groups[0].bytes_per_block)
            taken.set()

        running.worker._inbox.put(shrink)
        taken.wait(10)
        reply = running.post("/v1/completions", json={**BODY, "prompt": list(range(100, 900))})
        assert reply.status_code == 400
        assert "needs 50 blocks of group 0, which has 40" in reply.json()["error"]["message"]
        assert httpx.get(running.url + "/health").status_code == 200
        assert running.client().completions.create(prompt=[9, 8], max_tokens=3, **GREEDY).usage.completion_tokens == 3
        assert running.idle()
