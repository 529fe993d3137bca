"""`kvpool serve`: an OpenAI-compatible server."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Annotated

import typer

from kvpool import log
from kvpool.cli import options
from kvpool.errors import UnsupportedError

_log = logging.getLogger("kvpool.serve")


def serve(
    model: Annotated[str | None, typer.Option(help="Directory or GGUF file; default: the embedded model")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name that requests use")] = None,
    codec: Annotated[str | None, typer.Option(help="Stored format; default: the model's dtype")] = None,
    layout: Annotated[str, typer.Option(help="HND or NHD")] = "HND",
    tokens_per_block: Annotated[int, typer.Option()] = 32,
    budget: Annotated[str, typer.Option(help="Bytes of cache")] = "1GiB",
    host_size: options.HostSize = None,
    host_codec: options.HostCodec = None,
    disk: options.Disk = None,
    disk_size: options.DiskSize = None,
    dtype: Annotated[str, typer.Option(help="Element type the model is computed in")] = "bf16",
    backend: Annotated[str, typer.Option(help="auto, cpu or reference")] = "auto",
    max_sequences: Annotated[int, typer.Option(min=1, help="Most requests computed together")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Most rows of one forward pass")] = 512,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429")] = 256,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take; 0 for no limit")] = 0.0,
    drain: Annotated[float, typer.Option(help="Seconds a stop waits for open requests")] = 10.0,
    threads: options.Threads = None,
) -> None:
    """Serve completions and chat completions over HTTP."""
    try:
        import starlette as starlette
        import uvicorn as uvicorn
    except ImportError as error:
        raise UnsupportedError(f"kvpool serve needs {error.name}; pip install 'kvpool[serve]'") from None
    import torch

    import kvpool as kv
    from kvpool.engine import Engine
    from kvpool.engine.embedded import load_model
    from kvpool.serve.app import Server
    from kvpool.serve.listener import Listener
    from kvpool.serve.metrics import Metrics
    from kvpool.serve.worker import Worker
    from kvpool.tiers.identity import weights_identity

    if threads:
        torch.set_num_threads(threads)
    print(f"loading {model or 'the embedded model'} as {dtype}", file=sys.stderr, flush=True)
    network, tokenizer = load_model(model, dtype)
    plan = kv.make_plan(
        kv.CacheSpec.from_config(network.config),
        budget,
        codec=codec or dtype,
        layout=layout,
        tokens_per_block=tokens_per_block,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
    )
    print(plan, file=sys.stderr)
    cache = kv.KVCache(
        plan,
        backend=backend,
        num_threads=threads,
        host_size=host_size,
        host_codec=host_codec,
        disk=disk,
        disk_size=disk_size,
        model="" if disk is None else weights_identity(network.named_parameters(), network.config.to_dict()),
    )
    if cache.has_tiers:
        cache.below.check()  # opened now: a directory that cannot be used is refused before anybody asks
    engine = Engine(network, tokenizer, plan, cache=cache)
    metrics = Metrics(engine)
    worker = Worker(engine, max_waiting=max_waiting, observe=metrics.observe)
    server = Server(
        worker,
        metrics,
        served_model_name or model or "smollm2-135m-instruct",
        request_timeout_s=request_timeout or None,
        drain_s=drain,
    )
    gc.collect()
    gc.freeze()  # what lives now lives as long as the server: no collection need look at it again
    Listener(server, host=host, port=port, log_level="warning", timeout_keep_alive=60).run()
    gc.unfreeze()  # the interpreter's end collects it
    if not cache.close():
        log.say(_log, logging.WARNING, "not everything that was computed could be kept on disk", directory=disk)
