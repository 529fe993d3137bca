"""How fast is a decode step of the embedded model on kvpool, against transformers' DynamicCache in the same run?

    python benchmarks/decode_vs_transformers.py [--sequences 8] [--context 4000] [--codec bf16] [--threads 2]
                                                [--json FILE]

Both caches are filled with the same random keys and values, then decode steps alternate between them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache

import kvpool as kv
from kvpool.engine.embedded import load_model
from kvpool.transformers import PackedCache, register_attention


def filled_kvpool(model, contents, codec: str, extra: int, threads: int):
    """A kvpool cache whose sequences hold `contents [L, 2, S, H, T, D]`."""
    _, _, sequences, _, context, _ = contents.shape
    spec = kv.CacheSpec.from_config(model.config)
    blocks = sequences * (-(-(context + extra) // 64) + 1)
    plan = kv.make_plan(
        spec, num_blocks=blocks, codec=codec, tokens_per_block=64, max_sequences=sequences, max_step_tokens=context
    )
    cache = kv.KVCache(plan, num_threads=threads)
    rows = [cache.sequence([1000 + s] * context + [5]) for s in range(sequences)]
    for s, row in enumerate(rows):
        with cache.step([(row, context)]) as step:
            for layer in range(spec.num_layers):
                cache.write(layer, step, *contents[layer, :, s].transpose(1, 2).contiguous())
    return cache, rows


def filled_dynamic(model, contents):
    """A DynamicCache with the same contents."""
    cache = DynamicCache(config=model.config)
    for layer, (k, v) in enumerate(contents):
        cache.update(k.clone(), v.clone(), layer)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = load_model(None, "bf16")
    config = model.config
    torch.manual_seed(0)
    shape = (config.num_hidden_layers, 2, args.sequences, config.num_key_value_heads, args.context, 64)
    contents = torch.randn(shape, dtype=torch.bfloat16)
    cache, rows = filled_kvpool(model, contents, args.codec, args.steps + 2, args.threads)
    dynamic = filled_dynamic(model, contents)
    del contents
    packed = PackedCache(cache, model)
    times: dict[str, list[float]] = {"kvpool": [], "DynamicCache": []}
    with torch.inference_mode():
        for index in range(args.steps + 1):  # the first pair warms up
            model.set_attn_implementation(register_attention())
            started = time.perf_counter()
            with cache.step([(row, 1) for row in rows]) as step:
                packed.forward(step)
            cache.extend(step, [5] * step.num_samples)
            middle = time.perf_counter()
            model.set_attn_implementation("sdpa")
            ids = torch.full((args.sequences, 1), 5)
            begun = time.perf_counter()
            model(ids, cache=dynamic, use_cache=True, position_ids=torch.full_like(ids, args.context + index))
            if index:
                times["kvpool"].append(middle - started)
                times["DynamicCache"].append(time.perf_counter() - begun)
    median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    result = {
        "question": "decode step, ms",
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sequences": args.sequences,
        "context": args.context,
        "codec": args.codec,
        "threads": args.threads,
        "ms": median,
        "spread_ms": {name: [1e3 * min(v), 1e3 * max(v)] for name, v in times.items()},
        "times_faster": median["DynamicCache"] / median["kvpool"],
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
