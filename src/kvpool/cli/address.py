"""`kvpool address`: the address of one element, product by product, with its scales beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli import options
from kvpool.cli.options import LayoutName
from kvpool.plan import make_plan


def address(
    config: Annotated[
        Path | None,
        typer.Argument(help="config.json or its directory; default: the embedded model", show_default=False),
    ] = None,
    block: Annotated[int, typer.Option(help="Block id")] = 0,
    layer: Annotated[int, typer.Option(help="Layer of the model")] = 0,
    kv: Annotated[str, typer.Option(help="Part: k, v, latent, rope, index, or a state such as conv or ssm")] = "k",
    head: Annotated[int, typer.Option(help="KV head on this rank")] = 0,
    token: Annotated[int, typer.Option(help="Token in the block")] = 0,
    dim: Annotated[int, typer.Option(help="Element of the vector")] = 0,
    codec: Annotated[str | None, typer.Option(help="fp8, or by part: k=fp8,v=nvfp4")] = None,
    layout: Annotated[LayoutName, typer.Option(help="Order of the axes in memory")] = LayoutName.HND,
    layer_first: Annotated[bool, typer.Option("--layer-first", help="One dense range a layer")] = False,
    tokens_per_block: Annotated[int, typer.Option(help="Power of two, at least 2")] = 32,
    budget: Annotated[str | None, typer.Option(help="Bytes of cache; default: as many blocks as needed")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks")] = 1,
    tp_rank: Annotated[int, typer.Option(help="Rank the plan is for")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Print where an element lies in its group's slab: the base and every index times its stride."""
    plan = make_plan(
        options.read_spec(config),
        budget,
        num_blocks=max(block + 1, 1) if budget is None else None,
        codec=options.parse_codec(codec),
        layout=str(layout),
        layer_first=layer_first,
        tokens_per_block=tokens_per_block,
        tp_size=tp,
        tp_rank=tp_rank,
    )
    found = plan.address(block, layer, kv, head, token, dim)
    print(json.dumps(found.to_dict()) if as_json else found)
