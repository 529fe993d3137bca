"""`kvpool bench`: the native kernels against the bandwidth of this machine."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from kvpool.cli import options
from kvpool.cli.progress import bar


def _machine(isa: str) -> dict[str, Any]:
    import os
    import platform

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {"cpu": name, "cpus": os.cpu_count(), "isa": isa, "load": os.getloadavg()[0]}


def _clean(value: Any) -> Any:
    """NaN has no place in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _clean(v) for key, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def bench(
    case: Annotated[str, typer.Argument(help="decode, prefill, write, mla or copy")],
    codec: Annotated[str, typer.Option(help="Formats, comma-separated")] = "bf16,fp8,int8,nvfp4",
    layout: Annotated[str, typer.Option(help="HND, NHD or both, comma-separated")] = "HND",
    tokens_per_block: Annotated[str, typer.Option(help="Powers of two, comma-separated")] = "64",
    context: Annotated[int, typer.Option(help="Tokens of a sequence")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences")] = 1,
    heads: Annotated[str, typer.Option(help="Query heads, KV heads, head size; mla: heads, rank, rope")] = "",
    model: Annotated[str, typer.Option(help="Sizes of real models, comma-separated; instead of --heads")] = "",
    rows: Annotated[int, typer.Option(help="prefill: query rows; write: tokens of a call")] = 0,
    threads: Annotated[int, typer.Option(help="Threads")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each row")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Measure a case over formats, layouts and block sizes; every row beside the probes of the same seconds."""
    import os

    import torch
    from rich.console import Console
    from rich.table import Table

    from kvpool.backends.cpu import ISAS, choose_isa
    from kvpool.measure.bench import compare, measure
    from kvpool.measure.shapes import Shape, of_model

    torch.set_num_threads(threads)
    default = "16,512,64" if case == "mla" else "32,8,128"
    first, second, third = (options.integer(part, "--heads") for part in options.split(heads or default, "--heads"))
    if case == "mla":
        sizes: dict[str, Any] = {"q_heads": first, "kv_heads": 1, "head_dim": second + third, "v_dim": second}
    else:
        sizes = {"q_heads": first, "kv_heads": second, "head_dim": third}
    many = rows or {"prefill": 512, "write": 2048}.get(case, 1)
    models = options.split(model, "--model") if model else [""]
    plain = [
        Shape(case, name, order, n, context, batch, threads=threads, rows=many, **sizes)
        for name in options.split(codec, "--codec")
        for order in options.split(layout, "--layout")
        for n in (options.integer(part, "--tokens-per-block") for part in options.split(tokens_per_block, "..."))
    ]
    shapes = [of_model(shape, name) if name else shape for name in models for shape in plain]
    found = []
    with bar("first row") as shown:
        shown.expect(len(shapes))
        for shape in shapes:
            found.append(measure(shape, seconds))
            shown.advance(f"{shape.codec}, {shape.layout}, {shape.tokens_per_block} tokens a block")
    compare(found, "bf16")
    probe = {
        "read_gb_s": max((row["read_gb_s"] for row in found if "read_gb_s" in row), default=None),
        "dot_gflop_s": max((row["dot_gflop_s"] for row in found if "dot_gflop_s" in row), default=None),
        "copy_gb_s": max((row["copy_gb_s"] for row in found if "copy_gb_s" in row), default=None),
    }
    machine = _machine(ISAS[choose_isa(os.environ.get("KVPOOL_CPU"))])
    if as_json:
        print(json.dumps(_clean({"machine": machine, "probe": probe, "rows": found})))
        return
    columns = {
        "model": "model", "codec": "codec", "layout": "layout", "tokens_per_block": "N", "path": "path", "gb_s": "GB/s",
        "ratio_read": "/read", "ratio_paged_read": "/paged", "gflop_s": "GFLOP/s", "ratio_dot": "/dot",
        "ratio_copy": "/copy", "tokens_per_s": "token/s",
        "vs_bf16": "x bf16", "p50_us": "p50 us", "spread": "spread",
    }  # fmt: skip
    table = Table(title=f"{case}: {machine['cpu']}, {threads} threads, load {machine['load']:.1f}")
    present = [name for name in columns if any(row.get(name, "") != "" for row in found)]
    for name in present:
        table.add_column(columns[name], justify="right", no_wrap=True)
    peers = ("torch_sdpa", "torch_sdpa_rows")
    for name in ("x sdpa", "x sdpa rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        cells = [row.get(name, "") for name in present] + [row["vs_peer"].get(peer, "") for peer in peers]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=max(Console().width, 110)).print(table)
