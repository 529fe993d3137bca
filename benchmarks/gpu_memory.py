"""How near to the device's copy rate do writing, reading back and copying blocks come?

    python benchmarks/gpu_memory.py [--json FILE] [--device cpu]

A write or read of 64 MB and more of vectors counts the bytes of both sides once. `--device cpu` rehearses tiny shapes
in the interpreter (TRITON_INTERPRET=1) and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_steps import Bench, copy_rate, machine, measure

from kvpool.kinds import KVKind, LatentKind

CODECS = ("bf16", "fp8", "int8", "fp8-tensor", "nvfp4", "nvfp4-token")


def rows(device: str, keep: Callable[[dict], None] = lambda row: None) -> list[dict]:
    """Return a row for every case, or why it has no figures.

    Args:
        device: `cuda`, or `cpu` for a rehearsal.
        keep: Called with each row as it comes.
    """
    tiny = device == "cpu"
    rate = copy_rate(device)
    out: list[dict] = []

    def note(row: dict) -> None:
        out.append({"backend": "triton", **row})
        keep(out[-1])

    note({"case": "device copy", "backend": "torch", "gb_s": rate / 1e9})
    kinds = {"kv 8x128": KVKind(8, 128)} if tiny else {"kv 8x128": KVKind(8, 128), "latent 512+64": LatentKind(512, 64)}
    for name, kind in kinds.items():
        for codec in CODECS[:2] if tiny else CODECS:
            for case in ("write", "read"):
                row = {"case": f"{case} {name}", "codec": codec}
                try:
                    note(row | figures(*vectors(case, kind, codec, device), rate))
                except Exception as error:
                    traceback.print_exc()
                    note(row | {"error": f"{type(error).__name__}: {str(error)[-300:]}"})
                gc.collect()  # pools are in cycles with their parts
    try:
        note({"case": "copy blocks"} | figures(*blocks(device), rate))
    except Exception as error:
        traceback.print_exc()
        note({"case": "copy blocks", "error": f"{type(error).__name__}: {str(error)[-300:]}"})
    return out


def vectors(case: str, kind: KVKind | LatentKind, codec: str, device: str) -> tuple[float, float, float]:
    """Write or read vectors at random slots; return bytes moved, seconds and spread."""
    tokens = 32 if device == "cpu" else (1 << 17)
    bench = Bench(kind, codec, [tokens], [tokens], device=device)
    part = next(iter(bench.parts.values()))
    slots = bench.step.groups[0].slots
    slots = slots[torch.randperm(len(slots), device=device)]
    x = torch.randn(tokens, part.num_heads, part.vector.dim, device=device, dtype=torch.bfloat16)
    run = bench.backend.store if case == "write" else bench.backend.read
    given = (part, x, slots) if case == "write" else (part, slots, x)
    return x.numel() * (2 + part.codec.bits_per_element(part.vector) / 8), *measure(lambda: run(*given), device)


def blocks(device: str) -> tuple[float, float, float]:
    """Copy blocks of 4 MB, as those of many layers are; return bytes moved, seconds and spread."""
    tokens, n = (64, 16) if device == "cpu" else (1 << 18, 1024)
    bench = Bench(KVKind(8, 128), "bf16", [tokens], [1], tokens_per_block=n, device=device)
    group = bench.plan.groups[0]
    order = torch.randperm(group.num_blocks).tolist()
    half = len(order) // 2
    pairs = list(zip(order[:half], order[half:], strict=False))
    timed = measure(lambda: bench.backend.copy(bench.pools, 0, pairs), device, captured=False)
    return 2 * len(pairs) * group.bytes_per_block, *timed


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
        if "error" in row:
            print(f"{row['case']:24s} {row.get('codec', ''):12s} {row['error'][:160]}")
            continue
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
