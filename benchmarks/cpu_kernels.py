"""How fast are the CPU kernels, beside the machine's own limits, torch, vLLM and the prototypes, in the same minutes?

    python benchmarks/cpu_kernels.py [--part alone|copies|models|peers|calls|prototypes ...] [--vllm PYTHON]
                                     [--prototypes DIR] [--seconds 2] [--json benchmarks/results/cpu_kernels.json]

Every repetition of a kernel is followed by one of each probe and one of each peer. `--vllm` names the Python of an
environment that has vLLM; `--prototypes` a folder of single-file programs (bw2, app, decode, pf, mla), built here.
Parts that are not asked for stay in the file as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import kvpool as kv
from kvpool import _native
from kvpool.backends.cpu import CpuBackend
from kvpool.measure.bench import compare, measure
from kvpool.measure.shapes import MODELS, Shape, of_model

RESULTS = Path(__file__).parent / "results" / "cpu_kernels.json"
PARTS = ("alone", "copies", "models", "peers", "calls", "prototypes")
LATENT = {"kv_heads": 1, "head_dim": 576, "v_dim": 512}


def shape(case: str, codec: str = "bf16", layout: str = "HND", tokens_per_block: int = 64, **changes: Any) -> Shape:
    """The shape of DESIGN's table, changed."""
    sizes = {"context": 8192, "batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "threads": 1}
    return Shape(case, codec, layout, tokens_per_block, **{**sizes, **changes})


def shapes_alone() -> Iterator[Shape]:
    for codec in ("bf16", "fp8", "int8", "nvfp4", "nvfp4-token", "fp16"):
        yield shape("decode", codec)
    for codec in ("bf16", "fp8", "int8", "nvfp4"):
        yield shape("decode", codec, "NHD")
        yield shape("decode", codec, tokens_per_block=16)
        yield shape("decode", codec, threads=2, batch=2)
    for codec in ("bf16", "fp8", "nvfp4"):
        yield shape("prefill", codec, context=4096, rows=512)
    for heads in (16, 128):
        for codec in ("bf16", "fp8"):
            yield shape("mla", codec, context=4096, q_heads=heads, **LATENT)


def shapes_of_copies() -> Iterator[Shape]:
    """Appends, all of as many bytes, and moves of blocks."""
    for codec in ("bf16", "int8", "fp8", "fp8-tensor", "nvfp4", "nvfp4-token"):
        yield shape("write", codec, rows=2048)
    for sizes in ({"rows": 16384, "context": 16384, "kv_heads": 1}, {"rows": 4096, "head_dim": 64}):
        for codec in ("bf16", "int8", "fp8"):
            yield shape("write", codec, **sizes)
    yield shape("copy")


def shapes_of_models() -> Iterator[Shape]:
    for name, sizes in MODELS.items():
        case = "mla" if sizes.v_dim else "decode"
        for codec in ("bf16", "fp8"):
            yield of_model(shape(case, codec), name)


def shapes_with_peers() -> Iterator[Shape]:
    batch = {"threads": 2, "batch": 8, "context": 4096}
    for codec in ("bf16", "fp8"):
        for n in (64, 128):
            yield shape("decode", codec, tokens_per_block=n, **batch)
    for heads in (16, 128):
        yield shape("mla", tokens_per_block=64, q_heads=heads, **LATENT, **batch)
    for codec in ("bf16", "fp8"):
        yield shape("write", codec, threads=2, rows=2048)


class Vllm:
    """vLLM's kernels in a process of their own."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).parent / "peers" / "vllm_kernels.py"
        self.process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = ""

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"vLLM's process ended with {self.process.wait()} after {line!r}")
        return json.loads(answer)

    def prepare(self, case: Shape, tokens_per_block: int) -> str | None:
        """Return the kernel that will run; None where vLLM refuses the block size."""
        answer = self.ask(json.dumps({**asdict(case), "tokens_per_block": tokens_per_block}))
        self.version = answer.get("version", self.version)
        return answer.get("ready")

    def go(self) -> float:
        return float(self.ask("go"))


def with_vllm(case: Shape, vllm: Vllm, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each block size vLLM takes."""
    for n in (16, 64, 128) if case.case == "mla" else (64, 128):
        kernel = vllm.prepare(case, n)
        if kernel is None:
            continue
        row = measure(case, seconds, {"vllm": vllm.go})
        yield row | {"vllm_kernel": kernel, "vllm_tokens_per_block": n}


def calls() -> list[dict[str, Any]]:
    """What Python adds to a call: kvpool's door, its checks and the binding, around the same native work."""
    spec = kv.CacheSpec.from_config(
        {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    )  # fmt: skip
    cache = kv.KVCache(kv.make_plan(spec, num_blocks=8, tokens_per_block=16), num_threads=1)
    backend = cache.backend
    assert isinstance(backend, CpuBackend)
    seq = cache.sequence([1])
    q, k, v = (torch.randn(1, heads, 64).bfloat16() for heads in (4, 1, 1))
    out = torch.empty_like(q)
    part_k, part_v = (cache.pools.part(0, name) for name in "kv")
    rows = []

    def best(call: Any) -> float:
        found = math.inf
        for _ in range(300):
            start = time.perf_counter()
            for _ in range(20):
                call()
            found = min(found, (time.perf_counter() - start) / 20)
        return found * 1e6

    with cache.step([(seq, 1)]) as step:
        view = backend._views[step.buffers][0]
        stores = [backend._store(part) for part in (part_k, part_v)]
        native_write = lambda: _native.write_kv(  # noqa: E731
            backend._workers, view, stores[0], k.data_ptr(), 64, 64, stores[1], v.data_ptr(), 64, 64, 2
        )
        attention = _native.Attention([stores[0]], stores[1], 64, 4)
        native_attend = lambda: attention(  # noqa: E731
            backend._workers, view, q.data_ptr(), 2, 256, 64, out.data_ptr(), 2, 256, 64, 0.125, 0.0, 0, 0, 0, 0, 0, 0
        )
        for name, whole, native in (
            ("write", lambda: cache.write(0, step, k, v), native_write),
            ("attend", lambda: cache.attend(0, step, q, out=out), native_attend),
        ):
            whole_us, native_us = best(whole), best(native)
            rows.append({"call": name, "whole_us": whole_us, "native_us": native_us, "python_us": whole_us - native_us})
    return rows


def prototypes(folder: Path) -> list[dict[str, Any]]:
    """Build and run each program; those that need AMX say so where there is none."""
    runs = {"bw2": [], "app": [], "pf": ["1", "causal"], "mla": [], "decode": ["6", "0", "64", "1", "8192", "1", "20"]}
    flags = ["-O3", "-march=sapphirerapids", "-mgfni", "-fopenmp", "-std=c++20", "-w"]
    rows = []
    with tempfile.TemporaryDirectory() as build:
        for name, arguments in runs.items():
            program = Path(build) / name
            source = folder / f"{name}.cpp"
            if not source.exists():
                continue
            subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
            try:
                done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)
                lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
                rows.append({"program": name, "lines": lines, "status": done.returncode})
            except subprocess.TimeoutExpired:
                rows.append({"program": name, "lines": [], "status": "more than 60 s"})
    return rows


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": name, "cpus": os.cpu_count(), "torch": torch.__version__, "isa": CpuBackend(1).isa,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def clean(value: Any) -> Any:
    """Numbers to four digits; NaN has no place in JSON."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(v) for key, v in value.items()}
    return [clean(v) for v in value] if isinstance(value, list) else value


def run(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    if part == "calls":
        torch.set_num_threads(1)
        return calls()
    if part == "prototypes":
        return prototypes(args.prototypes) if args.prototypes else []
    if part == "peers":
        if not args.vllm:
            return []
        vllm, rows = Vllm(args.vllm), []
        for case in shapes_with_peers():
            torch.set_num_threads(case.threads)
            for row in with_vllm(case, vllm, args.seconds):
                rows.append(row | {"vllm": vllm.version})
                show(rows[-1:])
        return rows
    rows = []
    for case in {"alone": shapes_alone, "copies": shapes_of_copies, "models": shapes_of_models}[part]():
        torch.set_num_threads(case.threads)
        rows.append(measure(case, args.seconds))
        show(rows[-1:])
    compare(rows, "bf16")
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    names = ("case", "model", "codec", "layout", "tokens_per_block", "threads", "path", "gb_s", "ratio_read",
             "ratio_paged_read", "ratio_dot", "ratio_copy", "best_us", "vs_peer")  # fmt: skip
    for row in rows:
        print(" ".join(f"{clean(row[name])}" for name in names if name in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--vllm")
    parser.add_argument("--prototypes", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    report = json.loads(args.json.read_text()) if args.json.exists() else {}
    for part in args.part:
        started = machine()
        rows = run(part, args)
        if rows:
            report[part] = {"machine": started, "rows": clean(rows)}
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
