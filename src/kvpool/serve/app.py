"""The HTTP face: OpenAI's routes on a worker. Knows no model and no cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvpool import log
from kvpool.engine import Answer
from kvpool.serve.metrics import Metrics
from kvpool.serve.requests import Ask, BadRequest, read_ask
from kvpool.serve.worker import Busy, Stopped, Ticket, Update, Worker

_log = logging.getLogger("kvpool.serve")

#: Largest body taken.
MAX_BODY_BYTES = 8 << 20


def salt_of(request: Request) -> str | None:
    """Return the cache salt of a client: a hash of its API key, so that no two keys ever share a block."""
    key = request.headers.get("authorization")
    return None if key is None else hashlib.sha256(key.encode()).hexdigest()


def error_response(message: str, status: int, kind: str, param: str | None = None) -> JSONResponse:
    """Return an error in OpenAI's form."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


async def explain(request: Request, error: Exception) -> Response:
    """Return an exception as OpenAI's clients expect it. A coroutine, as any other handler is given a thread."""
    if isinstance(error, BadRequest):
        return error_response(str(error), error.status, "invalid_request_error", error.param)
    if isinstance(error, HTTPException):
        return error_response(error.detail, error.status_code, "invalid_request_error")
    if isinstance(error, Stopped):
        return error_response(str(error), 503, "server_error")
    return error_response(str(error), 429, "rate_limit_error")


class Server:
    """Routes of one model.

    Args:
        worker: Runs the engine.
        model_name: What `/v1/models` lists and requests must name.
        request_timeout_s: Longest time a request may take; None for no limit.
        drain_s: How long a stop waits for open requests.
    """

    def __init__(
        self, worker: Worker, metrics: Metrics, model_name: str, *, request_timeout_s: float | None, drain_s: float
    ) -> None:
        self.worker, self.metrics, self.model_name = worker, metrics, model_name
        self.request_timeout_s, self.drain_s = request_timeout_s, drain_s
        self.created = int(time.time())
        self.stopping = False
        self._draining: asyncio.Future[None] | None = None

    def app(self) -> Starlette:
        """Return the application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await self.drain()

        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.show_metrics, methods=["GET"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.model, methods=["GET"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((BadRequest, Busy, Stopped, HTTPException), explain),
            lifespan=lifespan,
        )

    async def drain(self) -> None:
        """Take no more requests, give open ones their time, end them with what they have, and stop the worker."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        await self._draining

    async def _drain(self) -> None:
        self.stopping = True
        begun = time.monotonic()
        while self.worker.num_open and time.monotonic() < begun + self.drain_s:
            await asyncio.sleep(0.05)
        log.say(_log, logging.INFO, "stopping", open_requests=self.worker.num_open)
        await asyncio.to_thread(self.worker.stop)
        log.say(_log, logging.INFO, "stopped")

    async def health(self, request: Request) -> Response:
        """200 while requests can be served."""
        if self.worker.alive and not self.stopping:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopping" if self.stopping else f"failed: {self.worker.failure}"}, 503)

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    def _card(self) -> dict[str, Any]:
        return {"id": self.model_name, "object": "model", "created": self.created, "owned_by": "kvpool"}

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Show the model."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _check_model(self, name: object) -> None:
        if name != self.model_name:
            raise BadRequest(f"model {name!r} is not served here; {self.model_name!r} is", "model", 404)

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = await read_body(request)
        if isinstance(body, dict):
            self._check_model(body.get("model"))
        if self.stopping:
            raise Stopped("the server stops and takes no more requests")
        engine = self.worker.engine
        ask = read_ask(
            body,
            engine.tokenizer,
            chat=chat,
            longest=engine.cache.plan.max_seq_len,
            salt=salt_of(request),
            deadline_s=self.request_timeout_s,
        )
        tickets: list[Ticket] = []
        try:
            for ids in ask.prompts:
                for _ in range(ask.n):
                    tickets.append(self.worker.submit(ids, ask.params))
        except Exception:
            for ticket in tickets:
                self.worker.release(ticket)
            raise
        reply = Reply(self.model_name, chat=chat)
        if ask.stream:
            return StreamingResponse(self._stream(ask, tickets, reply), media_type="text/event-stream")
        return await self._whole(request, tickets, reply)

    async def _whole(self, request: Request, tickets: list[Ticket], reply: Reply) -> Response:
        """Wait for all answers, or for the client to leave."""
        gone = asyncio.ensure_future(disconnected(request))
        done = asyncio.ensure_future(all_answers(tickets))
        try:
            waiting: set[asyncio.Future[Any]] = {gone, done}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return Response(status_code=499)
            updates = done.result()
        finally:
            gone.cancel()
            done.cancel()
            for ticket in tickets:
                self.worker.release(ticket)
        for update in updates:
            if update.event.finish_reason == "error":
                return error_response(update.event.error, *self._blame())
        answers = [update.answer for update in updates if update.answer is not None]
        return JSONResponse(reply.whole(answers))

    def _blame(self) -> tuple[int, str]:
        """Status and type of a request that ended with an error: ours where the engine failed, else the request's."""
        return (400, "invalid_request_error") if self.worker.failure is None else (500, "server_error")

    async def _stream(self, ask: Ask, tickets: list[Ticket], reply: Reply) -> AsyncIterator[str]:
        """Send every update as it comes; leaving early aborts what still runs."""
        merged: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()

        async def forward(index: int, ticket: Ticket) -> None:
            while True:
                update = await ticket.get()
                await merged.put((index, update))
                if update.event.finish_reason:
                    return

        tasks = [asyncio.ensure_future(forward(i, ticket)) for i, ticket in enumerate(tickets)]
        answers: list[Answer] = []
        try:
            for index in range(len(tickets)):
                if opening := reply.opening(index):
                    yield frame(opening)
            while len(answers) < len(tickets):
                index, update = await merged.get()
                if update.event.finish_reason == "error":
                    status, kind = self._blame()
                    yield frame({"error": {"message": update.event.error, "type": kind, "code": status}})
                elif update.event.text or update.event.finish_reason:
                    yield frame(reply.chunk(index, update.event.text, update.event.finish_reason))
                if update.answer is not None:
                    answers.append(update.answer)
            if ask.include_usage:
                yield frame(reply.usage_chunk(answers))
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            for ticket in tickets:
                self.worker.release(ticket)


class Reply:
    """Builds the objects of one response.

    Args:
        model: Name of the model.
        chat: Chat objects, not completions.
    """

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """Return the whole response."""
        choices = []
        for index, answer in enumerate(answers):
            content = (
                {"message": {"role": "assistant", "content": answer.text}} if self._chat else {"text": answer.text}
            )
            choices.append(
                {"index": index, **content, "finish_reason": finish_reason(answer.finish_reason), "logprobs": None}
            )
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(answers)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a chat choice: its role."""
        if not self._chat:
            return None
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def chunk(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """Return one piece of one choice."""
        content = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        choice = {"index": index, **content, "finish_reason": finish_reason(reason) if reason else None}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice]}

    def usage_chunk(self, answers: list[Answer]) -> dict[str, Any]:
        """Return the last chunk: token counts and no choice."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": usage(answers)}


def finish_reason(reason: str) -> str:
    """Return OpenAI's word for how a request ended: a deadline cuts an answer like a length does."""
    return "stop" if reason == "stop" else "length"


def usage(answers: list[Answer]) -> dict[str, Any]:
    """Return token counts, from the ledger's own."""
    prompt = sum(a.prompt_tokens for a in answers)
    generated = sum(len(a.token_ids) for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in answers)},
    }


def frame(payload: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


async def last_update(ticket: Ticket) -> Update:
    """Wait until a request has ended."""
    while True:
        update = await ticket.get()
        if update.event.finish_reason:
            return update


async def all_answers(tickets: list[Ticket]) -> list[Update]:
    """Wait until every request has ended."""
    return [await last_update(ticket) for ticket in tickets]


async def disconnected(request: Request) -> None:
    """Return when the client has closed its connection."""
    with suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass


async def read_body(request: Request) -> Any:
    """Read a JSON body of bounded size.

    Raises:
        BadRequest: It is too large, or no JSON.
    """
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise BadRequest(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413)
    except ClientDisconnect:
        raise BadRequest("the client left before its body was read", status=499) from None
    try:
        return json.loads(b"".join(chunks).decode())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
