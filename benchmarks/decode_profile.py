"""Whose time is a decode step: the model's, the kernels', or Python's around them?

    python benchmarks/decode_profile.py [--context 1024] [--sequences 8] [--codec bf16] [--steps 30]
    python benchmarks/decode_profile.py --table

The embedded model decodes in the engine on one thread; every part is CPU time of that thread. A clock is read around
each call of a kernel and around each layer's way into the cache, which costs them about a microsecond a layer.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "decode_profile.json"
DOCS = ROOT / "docs" / "engine.md"
PARTS = {
    "model": "the model: transformers and torch",
    "kernels": "kvpool's kernels: write and attend",
    "layers": "Python between the model and the kernels",
    "scheduler": "scheduling, ledger, step tensors, text, events",
    "sampling": "choosing tokens",
}


class Clock:
    """Adds up the CPU time of a function it stands before."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return timed


def measure(context: int, sequences: int, codec: str, steps: int) -> dict[str, Any]:
    """Decode, and return milliseconds a step by part."""
    import torch

    import kvpool as kv
    from kvpool.engine import Engine, Params
    from kvpool.engine.embedded import load_model

    torch.set_num_threads(1)
    model, tokenizer = load_model(None, "bf16")
    blocks = sequences * (-(-(context + steps) // 32) + 1)
    spec = kv.CacheSpec.from_config(model.config)
    plan = kv.make_plan(spec, num_blocks=blocks, codec=codec, max_sequences=sequences)
    engine = Engine(model, tokenizer, plan, num_threads=1)
    prefix = [5 + i % 997 for i in range(context - 1)]  # computed once: only decoding is looked at
    for number in range(sequences):
        engine.add([*prefix, 1000 + number], Params(max_new_tokens=steps + 4, stop_ids=frozenset()))
    while any(r.first_token_s is None for r in engine.scheduler):
        engine.step()
    kernels, layers = Clock(), Clock()
    cache = engine.cache
    cache.backend.write = kernels.around(cache.backend.write)  # type: ignore[method-assign]
    cache.backend.attend = kernels.around(cache.backend.attend)  # type: ignore[method-assign]
    packed = engine._packed
    packed.store = layers.around(packed.store)  # type: ignore[method-assign]
    packed.attend = layers.around(packed.attend)  # type: ignore[method-assign]
    before = (engine.timing.forward_s, engine.timing.scheduler_s, engine.timing.sampling_s)
    for _ in range(steps):
        engine.step()
    forward, scheduler, sampling = (
        after - b
        for after, b in zip(
            (engine.timing.forward_s, engine.timing.scheduler_s, engine.timing.sampling_s), before, strict=True
        )
    )
    seconds = {
        "model": forward - layers.seconds,
        "kernels": kernels.seconds,
        "layers": layers.seconds - kernels.seconds,
        "scheduler": scheduler,
        "sampling": sampling,
    }
    return {
        "context": context,
        "sequences": sequences,
        "codec": codec,
        "ms": {part: 1e3 * s / steps for part, s in seconds.items()},
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as a table."""
    points = results["points"]
    heads = [f"{p['sequences']} x {p['context']:,}" for p in points]
    lines = ["| CPU time of a decode step | " + " | ".join(heads) + " |", "|---" * (len(points) + 1) + "|"]
    for part, text in PARTS.items():
        cells = [f"{p['ms'][part]:.2f} ms ({p['ms'][part] / sum(p['ms'].values()):.1%})" for p in points]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--keep", action="store_true", help="put the point into the kept results")
    parser.add_argument("--table", action="store_true", help="print what was kept, and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULTS.read_text())), end="")
        return
    point = measure(args.context, args.sequences, args.codec, args.steps)
    print(table({"points": [point]}), end="")
    if args.keep:
        import torch
        import transformers

        kept = json.loads(RESULTS.read_text())["points"] if RESULTS.exists() else []
        key = ("sequences", "context", "codec")
        kept = [p for p in kept if any(p[k] != point[k] for k in key)]
        results = {
            "machine": platform.processor() or platform.machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "points": sorted([*kept, point], key=lambda p: [p[k] for k in key]),
        }
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
