"""How fast is paged attention on a GPU, by format and shape, against FlashInfer and torch SDPA in the same minute?

    python benchmarks/gpu_attention.py [--json FILE] [--seconds 200] [--device cpu] [--only decode|mla|prefill]

Decode of 64 query heads on 8 KV heads of 128; MLA of 16 and 128 heads on latents of 512 + 64; prefill of 2,048 tokens.
Bytes are those of the cache, read once, scales included. SDPA reads contiguous bf16. Cases run in order of interest
until the seconds are used up, and the rest is listed as not run. `--device cpu` rehearses tiny shapes in the
interpreter (TRITON_INTERPRET=1) and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_steps import Bench, copy_rate, machine, measure

from kvpool.backends.base import Attention
from kvpool.kinds import KVKind, LatentKind

DECODE_CODECS = ("bf16", "fp8", "int8", "nvfp4")
GRID = [(64, 8192), (1, 8192), (256, 2048), (16, 32768), (8, 2048), (64, 512), (1, 512), (256, 512), (1, 32768)]


def backends(device: str) -> dict[str, type]:
    from kvpool.backends.triton import TritonBackend

    found: dict[str, type] = {"triton": TritonBackend}
    try:
        import flashinfer  # noqa: F401

        from kvpool.backends.flashinfer import FlashInferBackend
    except ImportError:
        return found
    return found | ({"flashinfer": FlashInferBackend} if device != "cpu" else {})


def cases(device: str, only: str) -> Iterator[dict]:
    """Yield kind, codec, lengths, rows, heads and dimension of the values, most interesting first."""
    tiny = device == "cpu"
    gqa, mla = KVKind(8, 128), LatentKind(512, 64)
    shapes: list[tuple[str, object, tuple[str, ...], int, int, int, int]] = []  # batch, context, rows, heads
    for batch, context in [(2, 70)] if tiny else GRID:
        shapes.append(("decode", gqa, DECODE_CODECS[:1] if tiny else DECODE_CODECS, batch, context, 1, 64))
    for batch, context in [(2, 70)] if tiny else [(64, 8192), (128, 2048), (1, 8192), (16, 32768)]:
        for heads in (16,) if tiny else (16, 128):
            shapes.append(("mla", mla, ("bf16", "fp8"), batch, context, 1, heads))
    for batch, context, rows in [(1, 40, 20)] if tiny else [(1, 8192, 2048), (4, 2048, 2048), (1, 32768, 2048)]:
        shapes.append(("prefill", gqa, ("bf16",) if tiny else ("bf16", "fp8"), batch, context, rows, 64))
    for name, kind, codecs, batch, context, rows, heads in shapes:
        for codec in codecs if only in ("", name) else ():
            case = {"case": name, "kind": kind, "codec": codec}
            yield case | {"batch": batch, "context": context, "rows": rows, "heads": heads}


def run_case(case: dict, backend: type, device: str) -> dict:
    bench = Bench(
        case["kind"], case["codec"], [case["context"]] * case["batch"], [case["rows"]] * case["batch"],
        device=device, backend=backend,
    )  # fmt: skip
    latent = bench.parts.get("latent")
    k, v = (latent, latent) if latent else (bench.parts["k"], bench.parts["v"])
    v_dim = case["kind"].kv_lora_rank if latent else v.vector.dim
    rows = case["batch"] * case["rows"]
    q = torch.randn(rows, case["heads"], k.vector.dim, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, case["heads"], v_dim, device=device, dtype=torch.bfloat16)
    options = Attention(k.vector.dim**-0.5)
    seconds, spread = measure(lambda: bench.backend.attend(q, (k,), v, v_dim, bench.step, options, out, None), device)
    moved = bench.bytes_read() + 2 * (q.numel() + out.numel())
    seen = case["context"] - (case["rows"] - 1) / 2  # causal
    flops = 2 * rows * case["heads"] * seen * (k.vector.dim + v_dim)
    return {
        "us": seconds * 1e6,
        "gb_s": moved / seconds / 1e9,
        "tflops": flops / seconds / 1e12,
        "tokens_per_s": rows / seconds,
        "spread": spread,
    }


def warm(device: str) -> None:
    """Compile what the cases will need: kernels depend on formats and heads, not on batch and context."""
    seen = set()
    for case in cases(device, ""):
        key = (case["case"], case["codec"], case["heads"])
        if key not in seen:
            seen.add(key)
            for backend in backends(device).values():
                with contextlib.suppress(Exception):  # the case itself will say what is wrong
                    run_case({**case, "batch": 2, "context": max(512, case["rows"])}, backend, device)


def run_sdpa(case: dict, device: str) -> dict:
    """The same attention over contiguous bf16 that is there already."""
    shape = (case["batch"], case["kind"].num_kv_heads, case["context"], case["kind"].head_dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(case["batch"], case["heads"], case["rows"], shape[3], device=device, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds, spread = measure(lambda: attend(q, k, v, enable_gqa=True), device)
    moved = 2 * (k.numel() + v.numel() + 2 * q.numel())
    return {"us": seconds * 1e6, "gb_s": moved / seconds / 1e9, "spread": spread}


def rows(device: str, seconds: float, only: str = "") -> tuple[list[dict], list[str]]:
    out, left, started = [], [], time.monotonic()
    rate = copy_rate(device)
    bf16: dict[tuple, float] = {}
    for case in cases(device, only):
        name = {key: value for key, value in case.items() if key != "kind"}
        if time.monotonic() - started > seconds:
            left.append(" ".join(map(str, name.values())))
            continue
        for peer, backend in backends(device).items():
            try:
                figures = run_case(case, backend, device)
            except Exception as error:
                out.append({**name, "backend": peer, "error": f"{type(error).__name__}: {str(error)[-300:]}"})
                continue
            figures["of_copy"] = figures["gb_s"] * 1e9 / rate
            if peer == "triton":
                key = (case["case"], case["batch"], case["context"], case["rows"], case["heads"])
                bf16.setdefault(key, figures["us"])
                figures["vs_bf16"] = bf16[key] / figures["us"]
            out.append({**name, "backend": peer, **figures})
        if case["codec"] == "bf16" and case["case"] == "decode":
            out.append({**name, "backend": "torch sdpa", **run_sdpa(case, device)})
    return out, left


def show(out: list[dict], left: list[str]) -> None:
    for row in out:
        what = f"{row['case']:8s} {row['codec']:6s} B {row['batch']:3d} ctx {row['context']:6d} Q {row['heads']:3d}"
        if "error" in row:
            print(what, row["backend"], row["error"][:120])
            continue
        speed = f"{row['us']:9.1f} us {row['gb_s']:7.0f} GB/s {row.get('tflops', 0):6.1f} TF"
        print(f"{what} {row['backend']:10s} {speed} {row.get('vs_bf16', 0):5.2f} x bf16")
    if left:
        print(f"not run for lack of time: {len(left)} cases, {left[0]} and on")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--only", default="", choices=["", "decode", "mla", "prefill"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out, left = rows(args.device, args.seconds, args.only)
    show(out, left)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(args.device), "rows": out, "not_run": left}, indent=1))


if __name__ == "__main__":
    main()
