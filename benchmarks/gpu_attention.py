"""How fast is paged attention on a GPU, by format and shape, against FlashInfer and torch SDPA in the same minute?

    python benchmarks/gpu_attention.py [--json FILE] [--seconds 200] [--device cpu] [--only decode|mla|prefill]

Decode of 64 query heads on 8 KV heads of 128; MLA of 16 and 128 heads on latents of 512 + 64; prefill of 2,048 tokens.
Bytes are those of the cache, read once, scales included. FlashInfer reads the same pool through the same page table,
planned before the clock starts, and its output is held against ours before it is timed. SDPA reads contiguous bf16.
Cases run in order of interest until the seconds are used up, and the rest is listed as not run. `--device cpu`
rehearses tiny shapes in the interpreter (TRITON_INTERPRET=1) and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_steps import Bench, copy_rate, machine, measure
from torch.nn.attention.bias import causal_lower_right

from kvpool.backends.base import Attention
from kvpool.errors import UnsupportedError
from kvpool.kinds import KVKind, LatentKind

DECODE_CODECS = ("bf16", "fp8", "int8", "nvfp4")
GRID = [(64, 8192), (1, 8192), (256, 2048), (16, 32768), (8, 2048), (64, 512), (1, 512), (256, 512), (1, 32768)]
#: `fp8-tensor` is the one that FlashInfer's latents know; ours has better scales in `fp8`.
MLA_CODECS = ("bf16", "fp8", "fp8-tensor")
#: Relative L2 distance of two libraries' outputs over the same bytes: both round probabilities to bf16.
PEER_TOLERANCE = 2e-2


def backends(device: str) -> dict[str, type]:
    from kvpool.backends.flashinfer import FlashInferBackend
    from kvpool.backends.triton import TritonBackend

    found: dict[str, type] = {"triton": TritonBackend}
    if device != "cpu" and find_spec("flashinfer") is not None:
        found["flashinfer"] = FlashInferBackend
    return found


def cases(device: str, only: str) -> Iterator[dict]:
    """Yield kind, codec, lengths, rows, heads and dimension of the values, most interesting first."""
    tiny = device == "cpu"
    gqa, mla = KVKind(8, 128), LatentKind(512, 64)
    shapes: list[tuple[str, object, tuple[str, ...], int, int, int, int]] = []  # batch, context, rows, heads
    for batch, context in [(2, 70)] if tiny else GRID:
        shapes.append(("decode", gqa, DECODE_CODECS[:1] if tiny else DECODE_CODECS, batch, context, 1, 64))
    for batch, context in [(2, 70)] if tiny else [(64, 8192), (128, 2048), (1, 8192), (16, 32768)]:
        for heads in (16,) if tiny else (16, 128):
            shapes.append(("mla", mla, MLA_CODECS, batch, context, 1, heads))
    for batch, context, rows in [(1, 40, 20)] if tiny else [(1, 8192, 2048), (4, 2048, 2048), (1, 32768, 2048)]:
        shapes.append(("prefill", gqa, ("bf16",) if tiny else ("bf16", "fp8"), batch, context, rows, 64))
    for name, kind, codecs, batch, context, rows, heads in shapes:
        for codec in codecs if only in ("", name) else ():
            case = {"case": name, "kind": kind, "codec": codec}
            yield case | {"batch": batch, "context": context, "rows": rows, "heads": heads}


class Call:
    """One case: a step over filled pools and a query, for any backend."""

    def __init__(self, case: dict, device: str, *, filled: bool = True) -> None:
        batch, context, rows = case["batch"], case["context"], case["rows"]
        self.case, self.device = case, device
        self.bench = Bench(case["kind"], case["codec"], [context] * batch, [rows] * batch, device=device, filled=filled)
        parts = self.bench.parts
        latent = parts.get("latent")
        k, self.v = (latent, latent) if latent else (parts["k"], parts["v"])
        self.k = (k,)
        self.v_dim = case["kind"].kv_lora_rank if latent else self.v.vector.dim
        shape = (batch * rows, case["heads"], k.vector.dim)
        self.q = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self.options = Attention(k.vector.dim**-0.5)

    def on(self, backend: type) -> Callable[[], torch.Tensor]:
        """Return what attends with a backend, over the same pools and tables."""
        made = backend(self.device)
        made.prepare(self.bench.pools, self.bench.buffers)
        made.begin(self.bench.step)
        out = torch.empty((*self.q.shape[:2], self.v_dim), device=self.device, dtype=torch.bfloat16)

        def attend() -> torch.Tensor:
            made.attend(self.q, self.k, self.v, self.v_dim, self.bench.step, self.options, out, None)
            return out

        return attend

    def figures(self, seconds: float, spread: float) -> dict:
        case, dim = self.case, self.q.shape[-1]
        num_rows, heads = self.q.shape[:2]
        moved = self.bench.bytes_read() + 2 * num_rows * heads * (dim + self.v_dim)
        seen = case["context"] - (case["rows"] - 1) / 2  # causal
        return {
            "us": seconds * 1e6,
            "gb_s": moved / seconds / 1e9,
            "tflops": 2 * num_rows * heads * seen * (dim + self.v_dim) / seconds / 1e12,
            "tokens_per_s": num_rows / seconds,
            "spread": spread,
        }


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    """Fail when a library does not compute what ours does: its time would be that of something else."""
    distance = float((got.double() - want.double()).norm() / want.double().norm())
    if not distance <= PEER_TOLERANCE:  # also NaN
        raise AssertionError(f"its output differs from triton's by {distance:.1e}, allowed {PEER_TOLERANCE}")


def run_sdpa(case: dict, device: str) -> dict:
    """The same attention over contiguous bf16 that is there already."""
    batch, context, rows = case["batch"], case["context"], case["rows"]
    shape = (batch, case["kind"].num_kv_heads, context, case["kind"].head_dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, case["heads"], rows, shape[3], device=device, dtype=torch.bfloat16)
    mask = causal_lower_right(rows, context) if rows > 1 else None
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds, spread = measure(lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True), device)
    moved = 2 * (k.numel() + v.numel() + 2 * q.numel())
    return {"us": seconds * 1e6, "gb_s": moved / seconds / 1e9, "spread": spread}


def warm(device: str, only: str) -> None:
    """Compile what the cases will need: kernels depend on formats, heads and the width of the table, not on batch."""
    seen = set()
    for case in cases(device, only):
        key = (case["case"], case["codec"], case["heads"], case["context"] % 1024 == 0)
        if key not in seen:
            seen.add(key)
            try:
                Call({**case, "batch": 1}, device).on(backends("cpu")["triton"])()
            except Exception:  # the case itself will say what is wrong
                traceback.print_exc()


def run_case(case: dict, device: str, rate: float) -> Iterator[dict]:
    """Yield a row for every backend: figures, or why there are none."""
    name = {key: value for key, value in case.items() if key != "kind"}
    want = None
    call = Call(case, device)
    for peer, backend in backends(device).items():
        row = {**name, "backend": peer}
        try:
            attend = call.on(backend)
            got = attend().clone()
            want = got if want is None else want
            agree(got, want)
            figures = call.figures(*measure(attend, device))
            yield {**row, **figures, "of_copy": figures["gb_s"] * 1e9 / rate}
        except UnsupportedError as error:
            yield {**row, "refused": str(error)}
        except Exception as error:
            traceback.print_exc()
            yield {**row, "error": f"{type(error).__name__}: {str(error)[-300:]}"}
    if case["codec"] == "bf16" and case["case"] != "mla":
        try:
            yield {**name, "backend": "torch sdpa", **run_sdpa(case, device)}
        except Exception as error:
            yield {**name, "backend": "torch sdpa", "error": f"{type(error).__name__}: {str(error)[-300:]}"}


def rows(device: str, seconds: float, only: str = "", keep: Callable[[dict], None] = lambda row: None) -> list[dict]:
    """Return a row for every case and backend; `not_run` names a case there was no time for.

    Args:
        device: `cuda`, or `cpu` for a rehearsal.
        seconds: After so many no case is begun.
        only: Cases of one kind.
        keep: Called with each row as it comes.
    """
    out, started = [], time.monotonic()
    rate = copy_rate(device)
    bf16: dict[tuple, float] = {}
    for case in cases(device, only):
        late = time.monotonic() - started > seconds
        name = " ".join(str(value) for key, value in case.items() if key != "kind")
        for row in [{"not_run": name}] if late else run_case(case, device, rate):
            if row.get("backend") == "triton" and "us" in row:
                key = tuple(row[name] for name in ("case", "batch", "context", "rows", "heads"))
                if row["codec"] == "bf16":
                    bf16[key] = row["us"]
                if key in bf16:
                    row["vs_bf16"] = bf16[key] / row["us"]
            out.append(row)
            keep(row)
        gc.collect()  # pools are in cycles with their parts, and must not go while the next case is captured
    return out


def show(out: list[dict], left: list[str]) -> None:
    """Print a line a case: ours, and how long others take of our time."""
    lines: dict[str, list[str]] = {}
    refused = set()
    for row in out:
        what = f"{row['case']:8s} {row['codec']:10s} B {row['batch']:3d} ctx {row['context']:6d} Q {row['heads']:3d}"
        line = lines.setdefault(what, [])
        if "refused" in row:
            refused.add(f"{row['backend']} {row['case']} {row['codec']}")
        elif "error" in row:
            line.append(f"{row['backend']}: {row['error'][:120]}")
        elif row["backend"] == "triton":
            factor = f" {row['vs_bf16']:5.2f} x bf16" if "vs_bf16" in row else ""
            line.append(f"{row['us']:9.1f} us {row['gb_s']:6.0f} GB/s {row['tflops']:6.1f} TF{factor}")
        else:
            line.append(f"{row['backend']} {row['us']:9.1f} us")
    for what, line in lines.items():
        print(" | ".join([what, *line]))
    if refused:
        print(f"no kernel for it: {', '.join(sorted(refused))}")
    if left:
        print(f"not run for lack of time: {len(left)} cases, {left[0]} and on")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--only", default="", choices=["", "decode", "mla", "prefill"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = rows(args.device, args.seconds, args.only)
    out = [row for row in found if "not_run" not in row]
    left = [row["not_run"] for row in found if "not_run" in row]
    show(out, left)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(args.device), "rows": out, "not_run": left}, indent=1))


if __name__ == "__main__":
    main()
