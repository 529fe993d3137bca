"""`kvpool inspect`: the memory map of a plan as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli import options
from kvpool.cli.options import LayoutName
from kvpool.plan import make_plan


def inspect(
    config: Annotated[
        Path | None,
        typer.Argument(help="config.json or its directory; default: the embedded model", show_default=False),
    ] = None,
    plot: Annotated[Path, typer.Option(help="File to draw into: .png, .svg or .pdf")] = Path("memory-map.png"),
    budget: Annotated[str, typer.Option(help="Bytes of cache")] = "1GiB",
    codec: Annotated[str | None, typer.Option(help="fp8, or by part: k=fp8,v=nvfp4")] = None,
    layout: Annotated[LayoutName, typer.Option(help="Order of the axes in memory")] = LayoutName.HND,
    layer_first: Annotated[bool, typer.Option("--layer-first", help="One dense range a layer")] = False,
    tokens_per_block: Annotated[int, typer.Option(help="Power of two, at least 2")] = 32,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Draw slabs, one block, one layer of it, and its heads and tokens in both layouts."""
    from kvpool.measure.inspect import draw_map

    plan = make_plan(
        options.read_spec(config),
        budget,
        codec=options.parse_codec(codec),
        layout=str(layout),
        layer_first=layer_first,
        tokens_per_block=tokens_per_block,
        tp_size=tp,
    )
    draw_map(plan, plot)
    print(json.dumps({"plot": str(plot), "plan": plan.to_dict()}) if as_json else f"drawn: {plot}")
