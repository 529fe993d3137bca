"""A server on a thread of the tests' process."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import openai

import kvpool as kv
from kvpool.engine import Engine
from kvpool.serve.app import Server
from kvpool.serve.listener import Listener
from kvpool.serve.metrics import Metrics
from kvpool.serve.worker import Worker

NAME = "tiny"
GREEDY = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Running:
    """A server on a thread, on a free port of the loopback address."""

    def __init__(self, model, tokenizer, **settings) -> None:
        limits = {"max_sequences": settings.pop("max_sequences", 8), "max_step_tokens": 128}
        spec = kv.CacheSpec.from_config(model.config)
        plan = kv.make_plan(spec, num_blocks=256, codec="fp32", tokens_per_block=16, max_seq_len=1024, **limits)
        self.engine = Engine(model, tokenizer, plan, cache=kv.KVCache(plan, **settings.pop("tiers", {})))
        metrics = Metrics(self.engine)
        self.worker = Worker(self.engine, max_waiting=settings.pop("max_waiting", 64), observe=metrics.observe)
        self.app = Server(self.worker, metrics, NAME, **{"request_timeout_s": None, "drain_s": 5.0, **settings})
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = Listener(self.app, log_level="error", ws="none")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def client(self, key: str = "key") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0)

    def post(self, path: str, **arguments) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **arguments)

    def idle(self, timeout_s: float = 20.0) -> bool:
        """Wait until no request is open and no block is used."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.worker.num_open == 0 and self.engine.cache.stats().used == 0:
                return True
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()
