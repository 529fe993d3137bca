"""How many blocks a second does the ledger manage, beside vLLM's KVCacheManager and SGLang's RadixCache?

The conversation trace, 16 token ids for each trace id (built outside the clock), 10,000 blocks of 16 tokens, 8 requests
alive; hashing and comparing inside the clock; processor time, one thread. (SGLang's script gives wall time: compare it
on a quiet machine only.) The peers run in environments of their own, alternating with ours, by commands that print one
JSON line each:

    python benchmarks/ledger.py --trace conversation_trace.jsonl \
        --vllm "VLLM_PYTHON vllm_manager.py --trace T --blocks 10000 --block-size 16 --expand 16 --live 8" \
        --sglang "SGLANG_PYTHON sglang_radix.py --sglang-root R --trace T --capacity-blocks 10000 --block-tokens 16 \
--page-size 16"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
from pathlib import Path

import numpy as np

from kvpool import _native
from kvpool.ledger import Released
from kvpool.measure.replay import Request, load_trace, replay

BLOCKS = 10_000


class NumpyLRU:
    """A user's policy in numpy: least recently used, so that it evicts what the native order does."""

    def keys(self, released: Released) -> np.ndarray:
        return np.full(len(released.blocks), float(released.now))


def peer(command: str) -> float:
    """Blocks a second of a peer: of the JSON line it prints."""
    out = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout
    row = json.loads(out.strip().splitlines()[-1])
    if "us_per_block_core" in row:  # vLLM: its own calls and its hashing, processor time
        return 1e6 / (row["us_per_block_core"] + row["us_hash_per_block"])
    return float(row["blocks_per_s"])  # SGLang: no hashing, whole blocks only, wall time


def copies(requests: list[Request], num_copies: int, per_copy: int) -> list[Request]:
    """Interleave copies of the trace with shifted ids, so that a large cache is full."""
    out = []
    for request in requests[:per_copy]:
        for c in range(num_copies):
            out.append(Request(request.tokens + np.int32(c * 20_000_000), request.num_tokens, request.scale))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--vllm")
    parser.add_argument("--sglang")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--million", action="store_true", help="also 1,000,000 blocks, 100 interleaved copies")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    requests = load_trace(given.trace)
    ours = {
        "arrays": {},
        "lists": {"as_lists": True},
        "without SHA instructions": {"portable_sha": True},
        "user policy in numpy": {"policy": NumpyLRU()},
    }
    rates: dict[str, list[float]] = {name: [] for name in (*ours, "vllm", "sglang")}
    for _ in range(given.rounds):
        for name, options in ours.items():
            rates[name].append(replay(requests, BLOCKS - 1, **options).blocks_per_s)
        for name in ("vllm", "sglang"):
            if getattr(given, name):
                rates[name].append(peer(getattr(given, name)))
    rows = [
        {
            "case": name,
            "blocks_per_s": statistics.median(r),
            "spread": (max(r) - min(r)) / statistics.median(r),
            "vs_peer": {p: statistics.median(r) / statistics.median(rates[p]) for p in ("vllm", "sglang") if rates[p]},
        }
        for name, r in rates.items()
        if r
    ]
    if given.million:
        for blocks, num, per in ((10_000, 1, 3_000), (1_000_000, 100, 900)):
            row = replay(copies(requests, num, per), blocks, whole_blocks=False)
            rows.append({"case": f"{num} copies, {blocks} blocks", "us_per_block": 1e6 / row.blocks_per_s,
                         "hit_rate": row.hit_rate, "evicted": row.evicted})  # fmt: skip
    for row in rows:
        print(row)
    if given.output:
        machine = {"cpu": platform.processor() or platform.machine(), "sha": _native.has_sha(), "numpy": np.__version__,
                   "load_average": os.getloadavg()[0], "cores": os.cpu_count()}  # fmt: skip
        given.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
