"""`kvpool plan`: how much memory a model's cache takes, how much fits, what bound it, where each byte lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool import support
from kvpool.cli import options
from kvpool.cli.options import LayoutName
from kvpool.errors import PlanError
from kvpool.families.weights import FORMATS, Parameters, count_parameters
from kvpool.plan import Plan, describe, make_plan
from kvpool.plan.budget import format_bytes, parse_bytes
from kvpool.spec import CacheSpec

#: What `--compare` varies.
COMPARED = ("codec", "tokens_per_block", "layout", "tp", "budget")
#: Codecs that `--plot` draws unless others are compared.
PLOTTED = ("bf16", "fp8", "int8", "nvfp4")
#: Part of the memory the weights leave that the cache gets; activations and the allocator need the rest.
GPU_FRACTION = 0.9


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(help="config.json or its directory; default: the embedded model", show_default=False),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes of cache, such as 4GiB")] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Part of the memory free now; default 0.5 on a CPU")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to hold")] = None,
    num_blocks: Annotated[str | None, typer.Option(help="Blocks, or by group: full=4096,window=512")] = None,
    codec: Annotated[str | None, typer.Option(help="fp8, or by part: k=fp8,v=nvfp4,0=bf16")] = None,
    layout: Annotated[LayoutName, typer.Option(help="Order of the axes in memory")] = LayoutName.HND,
    layer_first: Annotated[bool, typer.Option("--layer-first", help="One dense range a layer")] = False,
    tokens_per_block: Annotated[int, typer.Option(help="Power of two, at least 2")] = 32,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks")] = 1,
    tp_rank: Annotated[int, typer.Option(help="Rank the plan is for")] = 0,
    layers: Annotated[str | None, typer.Option(help="Layers of this pipeline stage, such as 16:32")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest sequence; default: the model's")] = None,
    typical_seq_len: Annotated[int | None, typer.Option(help="Length the shares are made for")] = None,
    shares: Annotated[str | None, typer.Option(help="Parts of the budget: full=0.8,window=0.2")] = None,
    max_budget: Annotated[str | None, typer.Option(help="What the cache may be resized to")] = None,
    max_sequences: Annotated[int, typer.Option(help="Sequences of one step")] = 64,
    max_step_tokens: Annotated[int, typer.Option(help="Tokens of one step")] = 2048,
    num_draft: Annotated[int, typer.Option(help="Speculated tokens a sequence")] = 0,
    checkpoint_interval: Annotated[int, typer.Option(help="Tokens between checkpoints")] = 1024,
    host_budget: Annotated[str, typer.Option(help="Bytes of the host tier")] = "0",
    disk_budget: Annotated[str, typer.Option(help="Bytes of the disk tier")] = "0",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default cpu, with --gpu-memory cuda")] = None,
    context: Annotated[str | None, typer.Option(help="Lengths to count sequences for: 4096,32768")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one GPU: the cache gets what the weights leave")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="auto, bf16, fp8, int8 or nvfp4: count the model's own bytes")
    ] = None,
    compare: Annotated[str | None, typer.Option(help="codec=bf16,fp8 or tokens_per_block=16,32")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bytes by context and the split of the budget")] = None,
    advise: Annotated[bool, typer.Option("--advise", help="Say what bounds a decode step and what to try")] = False,
    batch: Annotated[int, typer.Option(help="Sequences of a decode step, for --advise")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Plan the cache of a model: sizes, blocks, tokens, sequences, and the places of all planes."""
    contexts = options.integers(context, "context") if context is not None else None
    settings: dict[str, Any] = {
        "budget": budget, "memory_fraction": memory_fraction, "max_tokens": max_tokens,
        "num_blocks": options.parse_blocks(num_blocks), "codec": options.parse_codec(codec), "layout": str(layout),
        "layer_first": layer_first, "tokens_per_block": tokens_per_block, "tp_size": tp, "tp_rank": tp_rank,
        "layers": options.parse_layers(layers), "max_seq_len": max_seq_len, "typical_seq_len": typical_seq_len,
        "shares": options.parse_shares(shares), "max_budget": max_budget, "max_sequences": max_sequences,
        "max_step_tokens": max_step_tokens, "num_draft": num_draft, "checkpoint_interval": checkpoint_interval,
        "host_budget": host_budget, "disk_budget": disk_budget, "device": device or ("cuda" if gpu_memory else "cpu"),
    }  # fmt: skip
    spec = options.read_spec(config)
    model = _weights(config, weights, gpu_memory, settings) if weights or gpu_memory or advise else None
    name, values = options.values_of(compare, COMPARED) if compare else ("codec", [])
    plans = {value: make_plan(spec, **{**settings, **_change(name, value)}) for value in values}
    report: dict[str, Any]
    if compare:
        report = {"compare": {"key": name, "values": values}}
        report["plans"] = [{name: value, **p.to_dict(contexts)} for value, p in plans.items()]
    else:
        plans = {"plan": make_plan(spec, **settings)}
        report = plans["plan"].to_dict(contexts)
    report["support"] = support.to_dict(spec)
    if model is not None:
        report["weights"] = model
    if advise:
        report["advice"] = _advice(config, spec, settings, str(model and model["format"]), batch, contexts)
    if plot is not None:
        _plot(spec, settings, plans if compare else None, plot, contexts)
        report["plot"] = str(plot)
    if as_json:
        print(json.dumps(report))
    else:
        print(_text(report, None if contexts is None else [str(n) for n in contexts]))
        print(f"\n{support.text(spec)}")


def _change(name: str, value: str) -> dict[str, Any]:
    """Return the setting that one compared value stands for; `+` separates the parts of a codec."""
    if name == "codec":
        return {"codec": options.parse_codec(value.replace("+", ","))}
    if name in ("tokens_per_block", "tp"):
        return {{"tp": "tp_size"}.get(name, name): options.integer(value, name)}
    return {name: value}


def _weights(
    config: Path | None, weights: str | None, gpu_memory: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Count the model's own bytes; with `gpu_memory`, give the cache most of what they leave."""
    parameters = _parameters(config)
    name = parameters.format if weights in (None, "auto") else str(weights)
    if name not in FORMATS:
        raise PlanError(f"weights {name!r} is unknown; use auto, {', '.join(FORMATS)}")
    size = parameters.num_bytes(name) // settings["tp_size"]
    out: dict[str, Any] = {"format": name, "parameters": parameters.total, "active_parameters": parameters.active}
    out["bytes"] = size
    if gpu_memory is not None:
        memory = parse_bytes(gpu_memory, "gpu_memory")
        left = max(memory - size, 0)
        out.update({"gpu_memory_bytes": memory, "left_bytes": left, "fraction": GPU_FRACTION})
        if settings["budget"] is None:
            if left == 0:
                raise PlanError(
                    f"weights of {format_bytes(size)} in {name} do not fit {format_bytes(memory)}: use more ranks"
                    f" (--tp), a smaller format (--weights) or a larger GPU"
                )
            settings["budget"] = int(left * GPU_FRACTION)
        elif parse_bytes(settings["budget"]) > left:
            raise PlanError(
                f"budget {settings['budget']} is above the {format_bytes(left)} that weights of {format_bytes(size)}"
                f" leave of {format_bytes(memory)}"
            )
    return out


def _parameters(config: Path | None) -> Parameters:
    return count_parameters(*options.read_config(config))


def _advice(
    config: Path | None, spec: CacheSpec, settings: dict[str, Any], weights: str, batch: int, contexts: list[int] | None
) -> dict[str, Any]:
    from kvpool.measure import advise

    def make(codec: str | None) -> Plan:
        return make_plan(spec, **(settings if codec is None else {**settings, "codec": codec}))

    context = (contexts or [min(spec.max_seq_len, 8192)])[0]
    found = advise.advise(make, _parameters(config), weights, batch, context)
    return {**found, "text": advise.sentences(found)}


def _plot(
    spec: CacheSpec, settings: dict[str, Any], plans: dict[str, Plan] | None, path: Path, contexts: list[int] | None
) -> None:
    """Draw the compared plans, or one for each common codec that can store this model."""
    from kvpool.measure.inspect import draw_budget

    if plans is None:
        plans = {}
        for codec in PLOTTED:
            try:
                plans[codec] = make_plan(spec, **{**settings, "codec": codec})
            except PlanError:
                continue  # this model has vectors such a codec cannot store
    draw_budget(plans, path, contexts)


def _text(report: dict[str, Any], lengths: list[str] | None) -> str:
    parts = [_side_by_side(report, lengths) if "compare" in report else describe.table(report, lengths)]
    model = report.get("weights")
    if model is not None:
        line = f"weights: {model['parameters'] / 1e9:.2f} billion parameters in {model['format']} (estimated from the"
        line += f" config): {format_bytes(model['bytes'])} a rank"
        if "left_bytes" in model:
            line += f", leaving {format_bytes(model['left_bytes'])} of {format_bytes(model['gpu_memory_bytes'])}"
            line += f"; the cache gets {model['fraction']:.0%} of that"
        parts.append(line)
    if "advice" in report:
        parts.append("\n".join(f"advice: {line}" for line in report["advice"]["text"]))
    if "plot" in report:
        parts.append(f"drawn: {report['plot']}")
    return "\n\n".join(parts)


def _side_by_side(report: dict[str, Any], lengths: list[str] | None) -> str:
    """Return the compared plans as a table with one column a plan."""
    plans = report["plans"]

    def row(name: str, values: list[str]) -> list[str]:
        return [name, *values]

    rows = [row(report["compare"]["key"], report["compare"]["values"])]
    base = plans[0]["num_tokens"]
    rows.append(row("tokens", [f"{p['num_tokens']:,}" for p in plans]))
    rows.append(row("of the first", [f"{p['num_tokens'] / base:.2f}x" if base else "-" for p in plans]))
    for part in ("full", "window", "index"):
        if any(p["bytes_per_token"][part] for p in plans):
            rows.append(row(f"bytes/token {part}", [f"{p['bytes_per_token'][part]:,}" for p in plans]))
    if any(p["state_bytes_per_sequence"] for p in plans):
        rows.append(row("state bytes", [f"{p['state_bytes_per_sequence']:,}" for p in plans]))
    for length in lengths or describe.shown(plans[0]):
        rows.append(row(f"sequences of {int(length):,}", [f"{p['sequences'][length]:,}" for p in plans]))
    rows.append(row("longest sequence", [f"{p['longest_sequence']:,}" for p in plans]))
    for index, group in enumerate(plans[0]["groups"]):
        rows.append(row(f"{group['name']}: blocks", [f"{p['groups'][index]['num_blocks']:,}" for p in plans]))
        rows.append(row("  bytes/block", [f"{p['groups'][index]['bytes_per_block']:,}" for p in plans]))
    for name, key in (("used", "used_bytes"), ("alignment", "alignment_bytes"), ("left over", "left_over_bytes")):
        rows.append(row(name, [format_bytes(p[key]) for p in plans]))
    rows.append(row("bound by", [p["bound_by"] for p in plans]))
    notes = plans[0]["notes"]
    text = "\n".join(describe.columns(rows, " " + "r" * len(plans)))
    return f"{plans[0]['model']}\n\n{text}" + ("\n\nnotes\n" + "\n".join(f"  - {n}" for n in notes) if notes else "")
