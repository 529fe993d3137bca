"""The socket's side: uvicorn, which says where it listens and stops as `Server.drain` has it. Knows no engine."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from kvpool import log
from kvpool.serve.app import Server

_log = logging.getLogger("kvpool.serve")

#: After open requests were ended, how long their clients have to read what is left; then they are cut off.
LAST_WORDS_S = 5.0


class Listener(uvicorn.Server):
    """Listens for a server's requests.

    Args:
        server: Answers them.
        settings: uvicorn's own, such as `host` and `port`.
    """

    def __init__(self, server: Server, **settings: Any) -> None:
        patience = math.ceil(server.drain_s + LAST_WORDS_S)
        super().__init__(uvicorn.Config(server.app(), access_log=False, timeout_graceful_shutdown=patience, **settings))
        self._server = server

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal. uvicorn raises it again at the end, which would end the process before `run` returns."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets=sockets)
        for listener in self.servers:
            for bound in listener.sockets:
                at, chosen = bound.getsockname()[:2]
                log.say(_log, logging.INFO, "listening", host=at, port=chosen, model=self._server.model_name)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections while open requests get their time; uvicorn alone would wait for them for ever."""
        draining = asyncio.ensure_future(self._server.drain())
        await super().shutdown(sockets)
        if self.force_exit:
            self._server.drain_s = 0.0  # a second interrupt: nobody wants to wait
        await draining
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out then
        for connection in self.server_state.connections:
            connection.transport.abort()  # its client takes nothing
        await asyncio.sleep(0)
