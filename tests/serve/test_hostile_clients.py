"""Clients that die, stall or do nothing; what the others get stays whole."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch
from running import GREEDY, NAME, Running

from kvpool.engine import engine as engine_module

pytestmark = pytest.mark.model

LONG = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 900, "stream": True, "ignore_eos": True, "temperature": 0}
TEXTS = (
    "naïve café, œuvre",
    "你好,世界!日本語も",
    "שלום עולם",
    "नमस्ते दुनिया",
    "Привет, мир",
    "سلام دنیا",
    "한국어",
    "👩‍👩‍👧🙂🏳️‍🌈🇺🇳 e\u0301",
)

CLIENT = """
import socket, sys, time
body = sys.argv[2].encode()
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.sendall(b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
client.recv(1)
print("x", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def running(tiny_model, tokenizer):
    server = Running(tiny_model, tokenizer)
    yield server
    server.stop()


def send(running: Running, body: dict) -> socket.socket:
    """Ask on a connection that takes little, and read nothing."""
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.connect(running.socket.getsockname())
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return client


def test_a_killed_client_frees_its_blocks(running):
    port = str(running.socket.getsockname()[1])
    client = subprocess.Popen([sys.executable, "-c", CLIENT, port, json.dumps(LONG)], stdout=subprocess.PIPE)
    assert client.stdout.read(1) == b"x"
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert running.idle()
    assert len(running.engine.scheduler.running) == 0


def test_slow_readers_stop_nobody(running):
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(send(running, LONG)) for _ in range(4)]
        while running.worker.num_open < len(slow):
            time.sleep(0.01)
        reply = running.client().completions.create(prompt=[9, 9], max_tokens=4, **GREEDY)
        assert reply.usage.completion_tokens == 4
        assert all(client.recv(16) for client in slow)
    assert running.idle()


def test_a_thousand_idle_connections_stop_nobody(running):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(running.socket.getsockname()))
        reply = running.client().completions.create(prompt=[4, 5], max_tokens=4, **GREEDY)
        assert reply.usage.completion_tokens == 4
        assert httpx.get(running.url + "/health").status_code == 200
    assert running.idle()


@pytest.mark.parametrize("text", TEXTS)
def test_every_language_streams_in_whole_characters(running, tokenizer, monkeypatch, text):
    """The model says what the test wants it to; all from the sampler to the client's parser is real."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    script = iter(ids)
    monkeypatch.setattr(engine_module, "sample", lambda logits, samplers: torch.tensor([next(script)]))
    pieces = []
    for chunk in running.client().chat.completions.create(
        messages=[{"role": "user", "content": "say it"}], max_tokens=len(ids), stream=True, **GREEDY
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_two_keys_never_share_a_block(running):
    ids, cache = list(range(2000, 2200)), running.engine.cache
    before = cache.stats()
    for key in ("carol", "dave"):
        reply = running.client(key).completions.create(prompt=ids, max_tokens=1, **GREEDY)
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
    after = cache.stats()
    assert after.hit_tokens == before.hit_tokens
    assert after.missed_tokens - before.missed_tokens == 2 * len(ids)
    assert cache.peek(ids) == 0, "a request without a key finds what a key computed"
    reply = running.client("carol").completions.create(prompt=ids, max_tokens=1, **GREEDY)
    assert reply.usage.prompt_tokens_details.cached_tokens == len(ids) - 1


def test_a_request_may_ask_for_less_time(running):
    reply = running.client().completions.create(
        prompt=[5, 6], max_tokens=1000, model=NAME, temperature=0, extra_body={"ignore_eos": True, "timeout": 0.2}
    )
    assert reply.usage.completion_tokens < 1000
    assert reply.choices[0].finish_reason == "length"
