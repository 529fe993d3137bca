"""How much faster is bringing a prompt's blocks back from the host tier than computing them again?

    python benchmarks/restore.py [--tokens 4000] [--json FILE]

The embedded model answers one token to a prompt, a second prompt pushes its blocks out, and it is asked again. The
device holds one prompt only, the host tier both. `restore` is the copy alone, `again` the whole second answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import kvpool as kv
from kvpool.engine import Engine, Params
from kvpool.engine.embedded import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    network, tokenizer = load_model(None, "bf16")
    spec = kv.CacheSpec.from_config(network.config)
    blocks = args.tokens // 32 + 3
    plan = kv.make_plan(spec, num_blocks=blocks, codec="bf16", max_sequences=1, max_seq_len=args.tokens + 64)
    cache = kv.KVCache(plan, host_size=3 * blocks * plan.groups[0].bytes_per_block)
    engine = Engine(network, tokenizer, plan, cache=cache)
    copies: list[float] = []

    def ask(first: int) -> float:
        begun = time.perf_counter()
        engine.generate([[first + i % 4000 for i in range(args.tokens)]], Params(max_new_tokens=1))
        return time.perf_counter() - begun

    computed, again = [], []
    for turn in range(args.turns):
        computed.append(ask(100 + 10 * turn))
        onboard = cache.below.transfer.onboard

        def timed(wanted: object, onboard: object = onboard) -> list[bool]:
            begun = time.perf_counter()
            found: list[bool] = onboard(wanted)
            copies.append(time.perf_counter() - begun)
            return found

        ask(5000 + 10 * turn)
        cache.below.transfer.onboard = timed
        again.append(ask(100 + 10 * turn))
        cache.below.transfer.onboard = onboard
    held = (args.tokens - 1) // 32 * 32
    result = {
        "tokens": held,
        "bytes": held // 32 * plan.groups[0].bytes_per_block,
        "compute_s": statistics.median(computed),
        "restore_s": statistics.median(copies),
        "again_s": statistics.median(again),
        "ratio": statistics.median(computed) / statistics.median(copies),
        "ratio_of_answers": statistics.median(computed) / statistics.median(again),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
