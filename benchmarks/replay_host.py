"""Does a host tier of 4 times the device find as much as a device of 5 times the size, and what does it move?

    python benchmarks/replay_host.py TRACE.jsonl [--blocks 1000] [--requests N] [--json FILE]

Requests of a Mooncake trace, one after another, 16 tokens an id, on whole caches with a tiny model: every decision and
every copy is real, only the blocks are small. Bytes are given as blocks, for any block size.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec

TOKENS_PER_ID = 16


def replay(trace: Path, requests: int, device_blocks: int, host_blocks: int) -> dict[str, object]:
    """Serve a trace and return hit rate and traffic."""
    spec = kv.CacheSpec(layers=(LayerSpec((KVKind(1, 8),)),), dtype="bf16", max_seq_len=1 << 17)
    plan = kv.make_plan(
        spec, num_blocks=device_blocks, tokens_per_block=TOKENS_PER_ID, max_sequences=2, max_step_tokens=1 << 16
    )
    host = {"host_size": host_blocks * 4096} if host_blocks else {}
    cache = kv.KVCache(plan, backend="reference", **host)
    hit = total = served = 0
    with trace.open() as lines:
        for line in islice(lines, requests):
            ids = json.loads(line)["hash_ids"]
            tokens = [i * TOKENS_PER_ID + j for i in ids for j in range(TOKENS_PER_ID)] + [1]
            if len(ids) + 2 > device_blocks:
                continue
            with cache.sequence(tokens) as sequence:
                while sequence.num_computed_tokens < len(tokens):
                    with cache.step([(sequence, len(tokens))]):
                        pass
                hit, total = hit + sequence.num_cached_tokens, total + len(tokens) - 1
                served += 1
    size = plan.groups[0].bytes_per_block
    tiers = {
        name: {"hits": t.hit, "blocks_down": t.written_bytes // size, "blocks_up": t.read_bytes // size}
        for name, t in cache.tier_stats().items()
    }
    return {
        "device_blocks": device_blocks,
        "host_blocks": host_blocks,
        "requests": served,
        "hit_rate": hit / total,
        "tiers": tiers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1 << 30, help="first so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        replay(args.trace, args.requests, args.blocks, 4 * args.blocks),
        replay(args.trace, args.requests, 5 * args.blocks, 0),
        replay(args.trace, args.requests, args.blocks, 0),
    ]
    for row in rows:
        print(json.dumps(row))
    if args.json:
        args.json.write_text(json.dumps({"trace": args.trace.name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
