"""How fast is a decode step of the embedded model under each cache of transformers and kvpool, and what do they hold?

    python benchmarks/decode_caches.py [--context 2048] [--batch 8] [--threads 1] [--steps 5] [--caches ...]
    python benchmarks/decode_caches.py --table

All caches of a run are filled with the same random keys and values; then they take turns, one step each, over the same
model in bf16. A run measures one point and puts it into the kept results; `--table` prints what they say. `hqq` and
`quanto` are measured where their packages are installed. `--one-layer` fills one layer of hqq and copies it to the
others, where filling takes minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "decode_caches.json"
DOCS = ROOT / "docs" / "transformers.md"
KVPOOL = ("kvpool bf16", "kvpool int8", "kvpool fp8")
THEIRS = ("DynamicCache", "StaticCache", "QuantizedCache fp8", "QuantizedCache hqq", "QuantizedCache quanto")
ALONE = "model alone"  # a cache of one token: what no cache can take away
GOES_ON = 64


def fill_theirs(name: str, config: Any, contents: Any, one_layer: bool = False) -> Any:
    """Return a cache of transformers that holds `contents [L, 2, B, H, T, D]`, or the first layer's in every layer."""
    from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

    kind, _, backend = name.partition(" ")
    if name == ALONE:
        cache, contents = DynamicCache(config=config), contents[:, :, :, :, :1]
    elif kind == "DynamicCache":
        cache = DynamicCache(config=config)
    elif kind == "StaticCache":
        cache = StaticCache(config=config, max_cache_len=contents.shape[4] + GOES_ON)
    elif backend == "fp8":
        cache = QuantizedCache("fp8", config)
    elif backend == "hqq":
        cache = QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1)
    else:
        cache = QuantizedCache(backend, config, nbits=4)
    one_layer = one_layer and backend == "hqq"
    for layer, (k, v) in enumerate(contents[:1] if one_layer else contents):
        cache.update(k.clone(), v.clone(), layer)
    for layer in cache.layers[1:] if one_layer else ():
        vars(layer).update({key: copy.deepcopy(x) for key, x in vars(cache.layers[0]).items() if key != "quantizer"})
    return cache


def fill_ours(name: str, model: Any, contents: Any, threads: int) -> Any:
    """Return a `PagedCache` that holds the same."""
    import torch

    from kvpool.transformers import PagedCache

    _, _, batch, _, context, _ = contents.shape
    blocks = batch * (-(-(context + GOES_ON) // 32) + 1)
    cache = PagedCache(
        model, codec=name.split()[1], num_threads=threads, num_blocks=blocks, max_step_tokens=batch * context
    )
    cache.begin(torch.arange(batch)[:, None] * 1000 + torch.arange(context) % 997)  # rows with nothing in common
    for layer, pair in enumerate(contents):
        k, v = pair.transpose(2, 3).flatten(1, 2)  # [B * T, H, D] each
        cache.cache.write(layer, cache.step, k.contiguous(), v.contiguous())
    cache.after_forward(failed=False)
    return cache


def held_bytes(cache: Any, name: str) -> int:
    """Return the bytes of all tensors a cache holds."""
    if name in KVPOOL:
        stats, groups = cache.cache.stats(), cache.cache.plan.groups
        return sum(s.used * g.bytes_per_block for s, g in zip(stats.groups, groups, strict=True))
    import torch

    seen: dict[int, int] = {}

    def visit(x: Any, depth: int) -> None:
        if isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, torch.nn.Parameter):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif depth < 8:
            inner = (
                x.values()
                if isinstance(x, dict)
                else x
                if isinstance(x, list | tuple)
                else vars(x).values()
                if hasattr(x, "__dict__")
                else ()
            )
            for y in inner:
                visit(y, depth + 1)

    for layer in cache.layers:
        visit({k: v for k, v in vars(layer).items() if k != "config"}, 0)
    return sum(seen.values())


def measure(
    context: int, batch: int, threads: int, steps: int, names: list[str], one_layer: bool = False
) -> dict[str, Any]:
    """Measure one point."""
    import torch

    from kvpool.engine.embedded import load_model

    torch.set_num_threads(threads)
    model, _ = load_model(None, "bf16")
    config = model.config
    torch.manual_seed(0)
    contents = torch.randn(
        config.num_hidden_layers, 2, batch, config.num_key_value_heads, context, config.head_dim, dtype=torch.bfloat16
    )
    caches, missing = {}, {}
    with torch.inference_mode():
        for name in names:
            try:
                ours = name in KVPOOL
                caches[name] = (
                    fill_ours(name, model, contents, threads)
                    if ours
                    else fill_theirs(name, config, contents, one_layer)
                )
            except ImportError as error:
                missing[name] = str(error)
        del contents
        times: dict[str, list[float]] = {name: [] for name in caches}
        ids = torch.full((batch, 1), 5)
        for step in range(steps + 1):  # the first warms up
            for name, cache in caches.items():
                position = torch.full_like(ids, (1 if name == ALONE else context) + step)
                started = time.perf_counter()
                model(input_ids=ids, position_ids=position, cache=cache, use_cache=True, logits_to_keep=1)
                if step:
                    times[name].append(1e3 * (time.perf_counter() - started))
    rows = {}
    for name, t in times.items():
        held = held_bytes(caches[name], name)
        rows[name] = {"ms": statistics.median(t), "best_ms": min(t), "worst_ms": max(t), "bytes": held}
    return {
        "context": context,
        "batch": batch,
        "threads": threads,
        "missing": missing,
        "caches": rows,
    }


def keep(point: dict[str, Any]) -> None:
    """Put a point into the kept results, in the place of an older one."""
    import torch
    import transformers

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"points": []}
    key = ("context", "batch", "threads")
    others = [p for p in results["points"] if any(p[k] != point[k] for k in key)]
    results["machine"] = platform.processor() or platform.machine()
    results["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    results["points"] = sorted([*others, point], key=lambda p: [p[k] for k in key])
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def table(results: dict[str, Any]) -> str:
    """Return the results as a table of milliseconds a step (and megabytes held)."""
    names = [ALONE, *THEIRS, *KVPOOL]
    points = results["points"]
    lines = [
        "| cache | " + " | ".join(f"{p['context']:,} x {p['batch']}" for p in points) + " |",
        "|---" * (len(points) + 1) + "|",
    ]
    for name in names:
        cells = []
        for point in points:
            found = point["caches"].get(name)
            size = "" if name == ALONE or not found else f" ({found['bytes'] / 1e6:.0f} MB)"
            cells.append(f"{found['ms']:,.0f} ms{size}" if found else "-")
        if set(cells) != {"-"}:
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--caches", nargs="+", choices=[ALONE, *THEIRS, *KVPOOL], default=[ALONE, *THEIRS, *KVPOOL])
    parser.add_argument("--one-layer", action="store_true", help="fill one layer of hqq, copy it to the others")
    parser.add_argument("--table", action="store_true", help="print what was kept, and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULTS.read_text())), end="")
        return
    point = measure(args.context, args.batch, args.threads, args.steps, args.caches, args.one_layer)
    print(json.dumps(point, indent=2))
    keep(point)


if __name__ == "__main__":
    main()
