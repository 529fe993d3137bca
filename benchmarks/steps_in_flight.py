"""Does planning a step while the one before runs make decoding faster here?

    python benchmarks/steps_in_flight.py [--sequences 8] [--context 512] [--threads 1] [--keep]

The embedded model answers in two engines of one process, one step in flight and two, in turn; all but the prompts' last
tokens is found in the cache, so that a round is decoding. On a CPU the second runs its passes on a thread of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "steps_in_flight.json"
DOCS = ROOT / "docs" / "engine.md"


def measure(sequences: int, context: int, threads: int, steps: int, rounds: int, device: str) -> dict[str, Any]:
    """Return milliseconds a decode step, median and extremes over rounds, by steps in flight."""
    import torch

    import kvpool as kv
    from kvpool.engine import Engine, Params
    from kvpool.engine.embedded import load_model

    torch.set_num_threads(threads)
    model, tokenizer = load_model(None, "bf16")
    model.to(device)
    spec = kv.CacheSpec.from_config(model.config)
    blocks = sequences * (-(-(context + steps + 1) // 32) + 1)
    plan = kv.make_plan(spec, num_blocks=blocks, max_sequences=sequences, max_seq_len=context + steps + 1)
    prefix = [5 + i % 997 for i in range(context - 1)]
    prompts = [[*prefix, 1000 + number] for number in range(sequences)]
    params = Params(max_new_tokens=steps + 1, stop_ids=frozenset())
    options = {"num_threads": threads, "device": device}
    engines = {depth: Engine(model, tokenizer, plan, steps_in_flight=depth, **options) for depth in (1, 2)}
    times: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds + 1):
        for depth, engine in engines.items() if number % 2 else reversed(engines.items()):
            started = time.perf_counter()
            engine.generate(prompts, params)
            if number:  # the first computes the prompts
                times[depth].append(1e3 * (time.perf_counter() - started) / (steps + 1))
    return {
        "sequences": sequences,
        "context": context,
        "threads": threads,
        "device": device,
        "ms_a_step": {d: {"median": statistics.median(t), "low": min(t), "high": max(t)} for d, t in times.items()},
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as a table: median (lowest to highest round)."""
    lines = ["| sequences x context, threads | one in flight | two |", "|---|---|---|"]
    for p in results["points"]:
        cells = [f"{t['median']:.1f} ms ({t['low']:.1f} to {t['high']:.1f})" for t in p["ms_a_step"].values()]
        lines.append(f"| {p['sequences']} x {p['context']}, {p['threads']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", action="store_true", help="put the point into the kept results")
    args = parser.parse_args()
    point = measure(args.sequences, args.context, args.threads, args.steps, args.rounds, args.device)
    print(json.dumps(point, indent=2))
    if args.keep:
        import torch

        kept = json.loads(RESULTS.read_text())["points"] if RESULTS.exists() else []
        key = ("device", "threads", "sequences", "context")
        kept = [p for p in kept if any(p[k] != point[k] for k in key)]
        results = {
            "machine": platform.processor() or platform.machine(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "points": sorted([*kept, point], key=lambda p: [p[k] for k in key]),
        }
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
