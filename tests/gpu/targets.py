"""The speeds a GPU has to show, and whether the figures of a run show them. Needs no package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
#: Shapes of decode whose bf16 cache is 2 GB: smaller ones measure launches, not memory.
LARGE = ((64, 8192), (256, 2048), (16, 32768))


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
        shares = [(r["of_copy"], f"{r['case']} {r['codec']}") for r in memory if r["case"].startswith(case)]
        name = "gather" if case == "read" else case
        found.append(at_least(f"{name} >= 0.85 of the copy rate", 0.85, shares))
    ours = {place(r): r for r in attention if r["backend"] == "triton" and "error" not in r}
    large = [r for r in ours.values() if r["case"] == "decode" and (r["batch"], r["context"]) in LARGE]
    rates = [(r["gb_s"], where(r)) for r in large if r["codec"] == "bf16"]
    if "H200" in device:
        found.append(at_least("bf16 decode >= 3800 GB/s", 3800, rates))
    else:
        found.append(Verdict("bf16 decode >= 3800 GB/s", f"a target for an H200, not for {device}", "not run"))
    for codec, wanted in (("fp8", 1.6), ("int8", 1.6), ("nvfp4", 2.4)):
        factors = [(r["vs_bf16"], where(r)) for r in large if r["codec"] == codec]
        found.append(at_least(f"{codec} decode >= {wanted} x bf16's tokens/s", wanted, factors))
    both = [(ours[place(r)], r) for r in attention if r["backend"] == "flashinfer" and "us" in r and place(r) in ours]
    factors = [(theirs["us"] / mine["us"], where(mine)) for mine, theirs in both]
    mla = [(factor, name) for (factor, name), (mine, _) in zip(factors, both, strict=True) if mine["case"] == "mla"]
    found.append(at_least("MLA decode >= 1 x FlashInfer's speed", 1.0, mla))
    found.append(at_least("every shape >= 1 / 1.1 x FlashInfer's speed", 1 / 1.1, factors))
    return found


def at_least(target: str, wanted: float, figures: list[tuple[float, str]]) -> Verdict:
    """Judge by the least of some (figure, where it was seen)."""
    if not figures:
        return Verdict(target, "no figure", "not run")
    least, name = min(figures)
    return Verdict(target, f"{least:.4g} ({name}), least of {len(figures)}", "ok" if least >= wanted else "MISSED")


def place(row: Row) -> tuple[Any, ...]:
    """Return what a case is, whoever runs it."""
    return tuple(row[key] for key in ("case", "codec", "batch", "context", "rows", "heads"))


def where(row: Row) -> str:
    return f"{row['case']} {row['codec']} B {row['batch']} ctx {row['context']} Q {row['heads']}"


def show(found: list[Verdict]) -> None:
    for verdict in found:
        print(f"{verdict.result:8s} {verdict.target:46s} {verdict.seen}")
