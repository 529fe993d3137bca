"""How much does a cached token add to a decode step, in llama.cpp's caches and in kvpool's?

    python benchmarks/growth_vs_llamacpp.py [--contexts 512 2048]      # needs the package xllamacpp
    python benchmarks/growth_vs_llamacpp.py --table

llama.cpp computes with weights of 4 bits, kvpool's side with bf16, so only growth compares: one sequence, one thread,
the same embedded model; kvpool's figures are those of benchmarks/decode_caches.py. llama.cpp runs with flash attention,
as its quantised caches need; its wheel is built for AVX2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "growth_vs_llamacpp.json"
OURS = ROOT / "benchmarks" / "results" / "decode_caches.json"
DOCS = ROOT / "docs" / "transformers.md"
#: Bytes a value takes: a block of 32 values has a scale of two bytes.
LLAMACPP = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
KVPOOL = {"bf16": 2.0, "int8": 1 + 4 / 64, "fp8": 1 + 4 / 64}
VALUES = 30 * 2 * 3 * 64  # of one token of the embedded model


def decode_ms(gguf: Path, context: int, kind: str, new_tokens: int = 16, rounds: int = 3) -> float:
    """Return milliseconds a token after `context` tokens of prompt."""
    import xllamacpp

    types = xllamacpp.ggml_type
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = (
        str(gguf), context + 128, 1, False, -1,
    )  # fmt: skip
    params.cache_type_k = params.cache_type_v = getattr(types, f"GGML_TYPE_{kind.upper()}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, 2
    server = xllamacpp.Server(params)
    prompt = [(i * 7919) % 40000 + 100 for i in range(context)]
    ask: dict[str, Any] = {"prompt": prompt, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
    server.handle_completions({**ask, "max_tokens": 1})
    done = [server.handle_completions({**ask, "max_tokens": new_tokens}) for _ in range(rounds)]
    return 1e3 / statistics.median(reply["timings"]["predicted_per_second"] for reply in done)


def measure(contexts: list[int]) -> dict[str, Any]:
    """Measure llama.cpp's caches at two contexts."""
    from kvpool.engine.embedded import embedded_gguf

    gguf = embedded_gguf()
    return {
        "version": metadata.version("xllamacpp"),
        "contexts": contexts,
        "ms": {kind: [decode_ms(gguf, context, kind) for context in contexts] for kind in LLAMACPP},
    }


def table(results: dict[str, Any]) -> str:
    """Return the growth of both as a table."""
    first, last = results["contexts"]
    points = {p["context"]: p["caches"] for p in json.loads(OURS.read_text())["points"] if p["batch"] == 1}
    rows = [("llama.cpp " + kind, *results["ms"][kind], size) for kind, size in LLAMACPP.items()]
    rows += [
        ("kvpool " + codec, *(points[c][f"kvpool {codec}"]["ms"] for c in (first, last)), size)
        for codec, size in KVPOOL.items()
    ]
    lines = [f"| cache | at {first:,} | at {last:,} | a token adds | a cached byte adds |", "|---|---|---|---|---|"]
    for name, before, after, size in rows:
        token_us = 1e3 * (after - before) / (last - first)
        byte_ns = 1e3 * token_us / (VALUES * size)
        lines.append(f"| {name} | {before:.1f} ms | {after:.1f} ms | {token_us:.1f} us | {byte_ns:.2f} ns |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs=2, default=[512, 2048])
    parser.add_argument("--table", action="store_true", help="print what was kept, and measure nothing")
    args = parser.parse_args()
    if not args.table:
        RESULTS.write_text(json.dumps(measure(args.contexts), indent=2) + "\n")
    print(table(json.loads(RESULTS.read_text())), end="")


if __name__ == "__main__":
    main()
