"""Write the tables of docs/performance.md from benchmarks/results/cpu_kernels.json; nobody edits them by hand.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu_kernels.json"
PAGE = ROOT / "docs" / "performance.md"
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def number(value: Any) -> str:
    """Three digits; nothing for what was not measured."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(number(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def heads(row: dict[str, Any]) -> str:
    return f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"


def attention(report: dict[str, Any], case: str) -> str:
    return markdown(
        ("format", "layout", "block", "", "path", "GB/s", "of read", "of paged read", "x bf16", "x SDPA",
         "x SDPA, rows", "p50 us", "spread"),
        (
            (r["codec"], r["layout"], r["tokens_per_block"], heads(r), r["path"], r["gb_s"], r["ratio_read"],
             r["ratio_paged_read"], r["vs_bf16"], r["vs_peer"].get("torch_sdpa"),
             r["vs_peer"].get("torch_sdpa_rows"), r["p50_us"], r["spread"])
            for r in report["alone"]["rows"] if r["case"] == case
        ),
    )  # fmt: skip


def products(report: dict[str, Any]) -> str:
    return markdown(
        ("case", "format", "path", "GFLOP/s", "of dot peak", "of read", "x SDPA with mask", "p50 ms", "spread"),
        (
            (f"prefill {r['rows']} on {r['context']:,}" if r["case"] == "prefill" else f"latents, {r['q_heads']} heads",
             r["codec"], r["path"], r["gflop_s"], r["ratio_dot"], r["ratio_read"] if r["case"] == "mla" else None,
             r["vs_peer"].get("torch_sdpa"), r["p50_us"] / 1e3, r["spread"])
            for r in report["alone"]["rows"] if r["case"] in ("prefill", "mla")
        ),
    )  # fmt: skip


def copies(report: dict[str, Any]) -> str:
    return markdown(
        ("case", "KV heads", "format", "source GB/s", "of memcpy", "p50 us", "spread"),
        (
            (r["case"], f"{r['kv_heads']} of {r['head_dim']}", r["codec"], r["gb_s"], r["ratio_copy"], r["p50_us"],
             r["spread"])
            for r in report["copies"]["rows"]
        ),
    )  # fmt: skip


def models(report: dict[str, Any]) -> str:
    return markdown(
        ("model", "format", "path", "GB/s", "of read", "of paged read", "of dot peak", "x bf16"),
        (
            (r["model"], r["codec"], r["path"], r["gb_s"], r["ratio_read"], r["ratio_paged_read"], r["ratio_dot"],
             r["vs_bf16"])
            for r in report["models"]["rows"]
        ),
    )  # fmt: skip


def peers(report: dict[str, Any]) -> str:
    """Each at its best block size."""
    best: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    for r in report["peers"]["rows"]:
        key = (r["case"], r["codec"], r["q_heads"])
        ours, theirs = best.get(key, (r, r))
        if r["best_us"] < ours["best_us"]:
            ours = r
        if vllm_us(r) < vllm_us(theirs):
            theirs = r
        best[key] = ours, theirs
    names = {"decode": "decode", "write": "append of 2,048", "mla": "latents"}
    return markdown(
        ("case", "format", "our block", "our us", "vLLM's kernel", "its block", "its us", "times faster"),
        (
            (names[case] + (f", {q_heads} heads" if case == "mla" else ""), codec, ours["tokens_per_block"],
             ours["best_us"], theirs["vllm_kernel"], theirs["vllm_tokens_per_block"], vllm_us(theirs),
             vllm_us(theirs) / ours["best_us"])
            for (case, codec, q_heads), (ours, theirs) in best.items()
        ),
    )  # fmt: skip


def vllm_us(row: dict[str, Any]) -> float:
    return float(row["vs_peer"]["vllm"] * row["best_us"])


def calls(report: dict[str, Any]) -> str:
    return markdown(
        ("call", "whole us", "native us", "Python us"),
        ((r["call"], r["whole_us"], r["native_us"], r["python_us"]) for r in report["calls"]["rows"]),
    )


def prototypes(report: dict[str, Any]) -> str:
    lines = []
    for r in report["prototypes"]["rows"]:
        lines += [f"{r['program']}: {line.strip()}" for line in r["lines"] if "nt=1" in line]
        if not r["lines"]:
            lines.append(f"{r['program']}: did not run on this CPU (exit status {r['status']})")
    return "```text\n" + "\n".join(lines) + "\n```\n"


TABLES = {
    "decode": lambda report: attention(report, "decode"),
    "products": products,
    "copies": copies,
    "models": models,
    "peers": peers,
    "calls": calls,
    "prototypes": prototypes,
}


def filled(text: str, report: dict[str, Any]) -> str:
    """Return the page with its tables made anew."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]](report) + place[3], text)


def main() -> int:
    text = PAGE.read_text()
    new = filled(text, json.loads(RESULTS.read_text()))
    if "--check" in sys.argv[1:]:
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
