"""How near to the device's copy rate do writing, reading back and copying blocks come?

    python benchmarks/gpu_memory.py [--json FILE] [--device cpu]

A write or read of 64 MB and more of vectors counts the bytes of both sides once. `--device cpu` rehearses tiny shapes
in the interpreter (TRITON_INTERPRET=1) and measures nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gpu_steps import Bench, copy_rate, machine, measure

from kvpool.kinds import KVKind, LatentKind

CODECS = ("bf16", "fp8", "int8", "fp8-tensor", "nvfp4", "nvfp4-token")


def rows(device: str) -> list[dict]:
    tiny = device == "cpu"
    rate = copy_rate(device)
    out = [{"case": "device copy", "gb_s": rate / 1e9}]
    kinds = {"kv 8x128": KVKind(8, 128)} if tiny else {"kv 8x128": KVKind(8, 128), "latent 512+64": LatentKind(512, 64)}
    for name, kind in kinds.items():
        for codec in CODECS[:2] if tiny else CODECS:
            tokens = 32 if tiny else (1 << 17)
            bench = Bench(kind, codec, [tokens], [tokens], device=device)
            part = next(iter(bench.parts.values()))
            slots = bench.step.groups[0].slots
            slots = slots[torch.randperm(len(slots), device=device)]
            x = torch.randn(tokens, part.num_heads, part.vector.dim, device=device, dtype=torch.bfloat16)
            stored = part.codec.bits_per_element(part.vector) / 8
            moved = x.numel() * (2 + stored)
            back = torch.empty_like(x)
            for case, run in (
                ("write", lambda b=bench, p=part, x=x, s=slots: b.backend.store(p, x, s)),
                ("read", lambda b=bench, p=part, y=back, s=slots: b.backend.read(p, s, y)),
            ):
                seconds, spread = measure(run, device)
                out.append({"case": f"{case} {name}", "codec": codec, **figures(moved, seconds, spread, rate)})
            del bench, x, back
    bench = Bench(KVKind(8, 128), "bf16", [64 if tiny else 1 << 18], [1], device=device)
    blocks = bench.plan.groups[0].num_blocks
    order = torch.randperm(blocks).tolist()
    pairs = list(zip(order[: blocks // 2], order[blocks // 2 :], strict=False))
    bench.backend.copy(bench.pools, 0, pairs[:1])
    seconds, spread = measure(lambda: bench.backend.copy(bench.pools, 0, pairs), device)
    out.append(
        {"case": "copy blocks", **figures(2 * len(pairs) * bench.plan.groups[0].bytes_per_block, seconds, spread, rate)}
    )
    return out


def figures(moved: float, seconds: float, spread: float, rate: float) -> dict:
    return {
        "bytes": int(moved),
        "us": seconds * 1e6,
        "gb_s": moved / seconds / 1e9,
        "of_copy": moved / seconds / rate,
        "spread": spread,
    }


def show(out: list[dict]) -> None:
    for row in out:
        share = f"{row['gb_s']:8.0f} GB/s {row.get('of_copy', 1):5.2f} of copy"
        print(f"{row['case']:24s} {row.get('codec', ''):12s} {share}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {"machine": machine(args.device), "rows": rows(args.device)}
    show(result["rows"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
