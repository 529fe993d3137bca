"""The clients of benchmarks/soak.py: what they ask for, how they misbehave, what they expect."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

NAME = "soak"
PREFIXES, VOCABULARY = 40, 49000
TIMEOUT_S = 300.0
WORDS = ("naïve café", "你好,世界", "שלום עולם", "नमस्ते दुनिया", "ありがとう", "👩‍👩‍👧🙂", "Привет, мир", "سلام")

#: A client that reads the beginning of an answer and waits.
TO_BE_KILLED = """
import socket, sys, time
body = sys.stdin.buffer.read()
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.sendall(b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
client.recv(1)
print("x", flush=True)
time.sleep(600)
"""

#: How often each kind of client comes.
KINDS = {
    "whole": 34, "stream": 22, "sampled": 6, "chat": 8, "several": 3, "abort": 7, "vanish": 4, "slow": 2, "killed": 1,
    "deadline": 3, "mistake": 10,
}  # fmt: skip

#: Mistake -> (path, body, status, words of the message).
MISTAKES: dict[str, tuple[str, Any, int, str]] = {
    "bad JSON": ("/v1/completions", b'{"model": ', 400, "no JSON"),
    "bad bytes": ("/v1/completions", b"\xff\xfe\x00", 400, "utf-8"),
    "no object": ("/v1/completions", b"[1]", 400, "must be a JSON object"),
    "other model": ("/v1/completions", {"model": "gpt", "prompt": "x"}, 404, "'gpt' is not served here"),
    "no prompt": ("/v1/completions", {"model": NAME}, 400, "prompt must be a text"),
    "empty prompt": ("/v1/completions", {"model": NAME, "prompt": ""}, 400, "the prompt has no tokens"),
    "over-long": ("/v1/completions", {"model": NAME, "prompt": [7] * 5000}, 400, "the longest sequence here is 4096"),
    "never fits": ("/v1/completions", {"model": NAME, "prompt": [8] * 3900, "max_tokens": 4}, 400, "blocks"),
    "hot": ("/v1/completions", {"model": NAME, "prompt": "x", "temperature": 9}, 400, "temperature must be"),
    "no length": ("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 0}, 400, "max_tokens must be"),
    "bad timeout": ("/v1/completions", {"model": NAME, "prompt": "x", "timeout": "soon"}, 400, "timeout must be"),
    "bad role": ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "x", "content": ""}]}, 400, ".role"),
    "no route": ("/v1/embeddings", {"model": NAME}, 404, "Not Found"),
}


class Traffic:
    """What clients ask for: prompts share prefixes, the popular ones most."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prefixes = [self.ids(self.random.randint(16, 320)) for _ in range(PREFIXES)]
        self.weights = [1 / (rank + 1) for rank in range(PREFIXES)]

    def ids(self, count: int) -> list[int]:
        """Return random token ids."""
        return [self.random.randint(300, VOCABULARY) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Return a prefix by Zipf's law and a tail of its own."""
        return self.random.choices(self.prefixes, self.weights)[0] + self.ids(self.random.randint(1, 60))

    def kind(self) -> str:
        """Return the kind of the next client."""
        return self.random.choices(list(KINDS), list(KINDS.values()))[0]


@dataclass
class Record:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    greedy: list[tuple[list[int], int, str]] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    busy: int = 0


class Clients:
    """Carries out one client of each kind; what it did not expect goes to the record."""

    def __init__(self, url: str, port: int, traffic: Traffic, record: Record) -> None:
        self.url, self.port, self.traffic, self.record = url, port, traffic, record
        self.bursting = False
        # A connection is not used again for longer than the server surely keeps it: neither side has to try twice.
        http = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(keepalive_expiry=5.0))
        self.openai = openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="soak", max_retries=0, timeout=TIMEOUT_S, http_client=http
        )

    async def come(self, kind: str) -> None:
        """One client, from beginning to end."""
        self.record.kinds[kind] += 1
        try:
            await asyncio.wait_for(getattr(self, kind)(), TIMEOUT_S)
        except openai.RateLimitError as error:
            if not self.bursting:
                self.record.failures.append(f"{kind}: {error}")
        except Exception as error:
            self.record.failures.append(f"{kind}: {type(error).__name__}: {error}")

    def ask(self, count: int, **more: Any) -> dict[str, Any]:
        extra = {"ignore_eos": True, **more.pop("extra_body", {})}
        return {"model": NAME, "max_tokens": count, "temperature": 0, "extra_body": extra, **more}

    async def whole(self) -> None:
        ids, count = self.traffic.prompt(), self.traffic.random.randint(1, 40)
        reply = await self.openai.completions.create(prompt=ids, **self.ask(count))
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), count), reply.usage
        self.record.greedy.append((ids, count, reply.choices[0].text))

    async def stream(self) -> None:
        ids, count = self.traffic.prompt(), self.traffic.random.randint(1, 40)
        text, usage = "", None
        chunks = await self.openai.completions.create(
            prompt=ids, stream=True, stream_options={"include_usage": True}, **self.ask(count)
        )
        async for chunk in chunks:
            usage = chunk.usage or usage
            text += "".join(choice.text for choice in chunk.choices)
        assert usage is not None
        assert usage.completion_tokens == count, usage
        self.record.greedy.append((ids, count, text))

    async def sampled(self) -> None:
        ids, seed = self.traffic.prompt(), self.traffic.random.randint(0, 99)
        # Few tokens to choose from: of thousands, rounding decides in one answer of forty.
        ask = {**self.ask(12, extra_body={"top_k": 20}), "temperature": 0.9, "top_p": 0.9, "seed": seed}
        first = await self.openai.completions.create(prompt=ids, **ask)
        second = await self.openai.completions.create(prompt=ids, **ask)
        assert first.choices[0].text == second.choices[0].text, "the same seed gave another text"

    async def chat(self) -> None:
        words = " ".join(self.traffic.random.choices(WORDS, k=6))
        messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]
        whole = await self.openai.chat.completions.create(messages=messages, **self.ask(16))
        text = ""
        async for chunk in await self.openai.chat.completions.create(messages=messages, stream=True, **self.ask(16)):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content, "the stream says other than the whole answer"

    async def several(self) -> None:
        reply = await self.openai.completions.create(
            prompt=[self.traffic.prompt(), self.traffic.prompt()], n=2, **self.ask(6)
        )
        texts = [choice.text for choice in reply.choices]
        assert texts[0] == texts[1], "two greedy answers differ"
        assert texts[2] == texts[3], "two greedy answers differ"

    async def deadline(self) -> None:
        ids = self.traffic.prompt()
        reply = await self.openai.completions.create(prompt=ids, **self.ask(3000, extra_body={"timeout": 0.3}))
        assert reply.usage is not None
        assert reply.usage.completion_tokens < 3000, "the deadline passed unseen"

    async def connect(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own, and read nothing."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    def long(self) -> dict[str, Any]:
        return {"model": NAME, "prompt": self.traffic.prompt(), "max_tokens": 400, "temperature": 0, "ignore_eos": True}

    async def abort(self) -> None:
        reader, writer = await self.connect({**self.long(), "stream": True})
        await reader.readuntil(b"data: ")
        await asyncio.sleep(self.traffic.random.random() / 4)
        writer.close()

    async def vanish(self) -> None:
        _, writer = await self.connect(self.long())
        await asyncio.sleep(self.traffic.random.random() / 4)
        writer.transport.abort()

    async def slow(self) -> None:
        reader, writer = await self.connect({**self.long(), "stream": True})
        for _ in range(30):
            assert await reader.read(8), "the server closed on a slow reader"
            await asyncio.sleep(0.1)
        writer.close()

    async def killed(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TO_BE_KILLED, str(self.port), stdin=-1, stdout=-1
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**self.long(), "stream": True}).encode())
        process.stdin.close()
        assert await process.stdout.read(1) == b"x"
        process.kill()
        await process.wait()

    async def mistake(self) -> None:
        name = self.traffic.random.choice(list(MISTAKES))
        path, body, status, words = MISTAKES[name]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        got, message = await asyncio.to_thread(post, self.url + path, data)
        assert got == status, f"{name}: {got} {message}"
        assert words in message, f"{name}: {message}"
        self.record.refusals[name] = f"{got} {message}"

    async def burst(self, count: int) -> None:
        """More at once than may wait: all are answered, some by 429."""

        async def one() -> None:
            try:
                await self.openai.completions.create(prompt=self.traffic.prompt(), **self.ask(2))
            except openai.RateLimitError:
                self.record.busy += 1

        self.bursting = True
        for outcome in await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True):
            if outcome is not None:
                self.record.failures.append(f"burst: {outcome!r}")
        self.bursting = False


def post(url: str, data: bytes) -> tuple[int, str]:
    """Return the status and the message of the error a body gets."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, data), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
    return 200, ""
