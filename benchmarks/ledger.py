"""How many blocks a second does the ledger manage, beside vLLM's KVCacheManager and SGLang's RadixCache?

The conversation trace, 16 token ids for each trace id (built outside the clock), 10,000 blocks of 16 tokens, 8 requests
alive; hashing and comparing inside the clock; processor time, one thread. The peers run in environments of their own,
each between two runs of ours, by commands that print one JSON line each; ratios are of the medians, of the fastest
runs, and round by round. SGLang's script asks for wall time; the wrapper below gives it processor time:

    python benchmarks/ledger.py --trace conversation_trace.jsonl --million \
        --vllm "VLLM_PYTHON vllm_manager.py --trace T --blocks 10000 --block-size 16 --expand 16 --live 8" \
        --sglang "SGLANG_PYTHON -c 'import runpy, sys, time; time.perf_counter = time.process_time; del sys.argv[0]; \
runpy.run_path(sys.argv[0])' sglang_radix.py --sglang-root R --trace T --capacity-blocks 10000 --block-tokens 16 \
--page-size 16"
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ledger_calls import CASES, copies
from ledger_decode import cpu_name

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
    return float(row["blocks_per_s"])  # SGLang: no hashing, whole blocks only


Rounds = dict[str, list[list[float]]]


def measure_rounds(requests: list[Request], peers: dict[str, str], num_rounds: int) -> tuple[Rounds, Rounds]:
    """Blocks a second of our cases and of the peers, by round: ours before and after each peer."""
    cases: dict[str, dict[str, Any]] = {
        "arrays": {},
        "lists": {"as_lists": True},
        "without SHA instructions": {"portable_sha": True},
        "user policy in numpy": {"policy": NumpyLRU()},
    }
    ours: Rounds = {name: [[] for _ in range(num_rounds)] for name in cases}
    theirs: Rounds = {name: [[] for _ in range(num_rounds)] for name in peers}
    for i in range(num_rounds):
        for peer_name in (None, *peers):
            if peer_name is not None:
                theirs[peer_name][i].append(peer(peers[peer_name]))
            replay(requests, BLOCKS - 1)  # another process had the caches: whoever comes first would pay for it
            for name, options in cases.items():
                ours[name][i].append(replay(requests, BLOCKS - 1, **options).blocks_per_s)
    return ours, theirs


def summary(name: str, ours: list[list[float]], theirs: Rounds) -> dict[str, Any]:
    """Medians and fastest runs: a neighbour on the same processor halves the speed of both for seconds at a time."""
    every = [rate for rates in ours for rate in rates]
    peers = {p: [rate for rates in rounds for rate in rates] for p, rounds in theirs.items()}
    by_round = {
        p: [statistics.median(a) / statistics.median(b) for a, b in zip(ours, rounds, strict=True)]
        for p, rounds in theirs.items()
    }
    return {
        "case": name,
        "blocks_per_s": statistics.median(every),
        "fastest_blocks_per_s": max(every),
        "spread": (max(every) - min(every)) / statistics.median(every),
        "peer_blocks_per_s": {p: statistics.median(rates) for p, rates in peers.items()},
        "peer_fastest_blocks_per_s": {p: max(rates) for p, rates in peers.items()},
        "vs_peer_median": {p: statistics.median(every) / statistics.median(rates) for p, rates in peers.items()},
        "vs_peer_fastest": {p: max(every) / max(rates) for p, rates in peers.items()},
        "vs_peer_by_round": by_round,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--vllm")
    parser.add_argument("--sglang")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million", action="store_true", help="also 1,000,000 blocks, 100 interleaved copies")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    requests = load_trace(given.trace)
    peers = {name: command for name in ("vllm", "sglang") if (command := getattr(given, name))}
    ours, theirs = measure_rounds(requests, peers, given.rounds)
    rows = [summary(name, rounds, theirs) for name, rounds in ours.items()] if given.rounds else []
    if given.million:
        for blocks, num, per in CASES:
            copied = copies(requests, num, per)
            runs = [replay(copied, blocks) for _ in range(5 if num == 1 else 3)]
            times = [1e6 / r.blocks_per_s for r in runs]
            rows.append({"case": f"{num} copies, {blocks} blocks", "us_per_block": statistics.median(times),
                         "range": [min(times), max(times)], "hit_rate": runs[0].hit_rate,
                         "evicted": runs[0].evicted})  # fmt: skip
    for row in rows:
        print(row)
    if given.output:
        machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "sha": _native.has_sha(), "numpy": np.__version__,
                   "python": sys.version.split()[0], "load_average": os.getloadavg()[0]}  # fmt: skip
        given.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
