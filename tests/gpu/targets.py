"""The speeds a GPU has to show, and whether the figures of a run show them. Needs no package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
#: Shapes of decode whose bf16 cache is 2 GB: smaller ones measure launches, not memory.
LARGE = ((64, 8192), (256, 2048), (16, 32768))
#: How much faster than bf16 a smaller format has to be.
FACTORS = {"fp8": 1.6, "int8": 1.6, "nvfp4": 2.4}


@dataclass(frozen=True)
class Verdict:
    """A target.

    Attributes:
        target: What has to hold.
        seen: The figure nearest to missing it, and where; or why there is none.
        result: `ok`, `MISSED` or `not run`.
    """

    target: str
    seen: str
    result: str


def verdicts(device: str, memory: list[Row], attention: list[Row]) -> list[Verdict]:
    """Hold the rows of `gpu_memory` and `gpu_attention` against the targets.

    Args:
        device: The device's name.
        memory: Writing, reading and copying, as shares of the copy rate.
        attention: Cases of ours, of FlashInfer and of torch.
    """
    found = []
    for case in ("write", "read"):
        asked = [r for r in memory if r["case"].startswith(case)]
        shares = [(r["of_copy"], f"{r['case']} {r['codec']}") for r in asked if "error" not in r]
        name = "gather" if case == "read" else case
        found.append(at_least(f"{name} >= 0.85 of the copy rate", 0.85, shares, len(asked) - len(shares)))
    ours = {place(r): r for r in attention if r["backend"] == "triton" and "us" in r}
    large = [r for r in attention if r["backend"] == "triton" and r["case"] == "decode"]
    large = [r for r in large if (r["batch"], r["context"]) in LARGE]
    for codec, key, target, wanted in (
        ("bf16", "gb_s", "bf16 decode >= 3800 GB/s", 3800),
        *((codec, "vs_bf16", f"{codec} decode >= {x} x bf16's tokens/s", x) for codec, x in FACTORS.items()),
    ):
        asked = [r for r in large if r["codec"] == codec]
        figures = [(r[key], where(r)) for r in asked if key in r]
        if codec == "bf16" and "H200" not in device:
            found.append(Verdict(target, f"a target for an H200, not for {device}", "not run"))
        else:
            found.append(at_least(target, wanted, figures, len(asked) - len(figures)))
    theirs = [r for r in attention if r["backend"] == "flashinfer" and "refused" not in r]
    for target, wanted, rows in (
        ("MLA decode >= 1 x FlashInfer's speed", 1.0, [r for r in theirs if r["case"] == "mla"]),
        ("every shape >= 1 / 1.1 x FlashInfer's speed", 1 / 1.1, theirs),
    ):
        both = [(ours[place(r)], r) for r in rows if "us" in r and place(r) in ours]
        factors = [(peer["us"] / mine["us"], where(mine)) for mine, peer in both]
        found.append(at_least(target, wanted, factors, len(rows) - len(factors)))
    return found


def at_least(target: str, wanted: float, figures: list[tuple[float, str]], failed: int = 0) -> Verdict:
    """Judge by the least of some (figure, where it was seen); with cases that failed, nothing is shown to hold."""
    if not figures:
        return Verdict(target, f"no figure, {failed} failed" if failed else "no figure", "not run")
    least, name = min(figures)
    seen = f"{least:.4g} ({name}), least of {len(figures)}" + (f", {failed} failed" if failed else "")
    return Verdict(target, seen, "MISSED" if least < wanted else "not run" if failed else "ok")


def place(row: Row) -> tuple[Any, ...]:
    """Return what a case is, whoever runs it."""
    return tuple(row[key] for key in ("case", "codec", "batch", "context", "rows", "heads"))


def where(row: Row) -> str:
    return f"{row['case']} {row['codec']} B {row['batch']} ctx {row['context']} Q {row['heads']}"


def show(found: list[Verdict]) -> None:
    for verdict in found:
        print(f"{verdict.result:8s} {verdict.target:46s} {verdict.seen}")
