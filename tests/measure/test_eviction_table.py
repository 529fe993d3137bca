"""The hit rates in docs/eviction.md are those of the committed replays."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def table(name: str) -> dict[tuple[str, int], float]:
    """Read the table whose first column is headed `name`: rate by (policy or optimum, blocks)."""
    lines = (ROOT / "docs" / "eviction.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {name} |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : lines.index("", start)]]
    capacities = [int(cell.replace(",", "")) for cell in rows[0][1:]]
    return {
        (row[0].strip("`").split(" ")[0], blocks): float(cell)
        for row in rows[2:]
        for blocks, cell in zip(capacities, row[1:], strict=True)
    }


@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_the_table_of_a_trace_is_what_was_replayed(trace: str) -> None:
    replayed = json.loads((ROOT / "benchmarks" / "results" / f"eviction-{trace}.json").read_text())
    rates = {(r["policy"], r["blocks"]): r["hit_rate"] for r in replayed["rows"]}
    rates |= {("optimum", int(blocks)): rate for blocks, rate in replayed["optimum"].items()}
    shown = table(trace)
    assert len(shown) >= 18
    assert shown == {key: round(rates[key], 4) for key in shown}
    text = (ROOT / "docs" / "eviction.md").read_text()
    assert f"{replayed['infinite']:.4f}".lstrip("0") in text


def test_the_figures_of_the_ledger_are_those_that_were_kept() -> None:
    text = (ROOT / "docs" / "eviction.md").read_text()
    results = ROOT / "benchmarks" / "results"
    for row in json.loads((results / "ledger.json").read_text())["rows"]:
        if "vs_peer_median" in row:
            ratios = row["vs_peer_median"]
            shown = f"| {row['blocks_per_s'] / 1e6:.2f} | {ratios['vllm']:.1f} | {ratios['sglang']:.1f} |"
        else:
            shown = f"{row['us_per_block']:.2f} us"
        assert shown in text, row["case"]
    for row in json.loads((results / "ledger_decode.json").read_text())["rows"]:
        assert f"| {row['mean_us']:.1f} | {row['due_p99_us']:.0f} |" in text
    calls = {row["blocks"]: row for row in json.loads((results / "ledger_calls.json").read_text())["rows"]}
    least = {blocks: math.ceil(row["longest_call_us"]) for blocks, row in calls.items()}
    assert f"{least[10_000]} us at 10,000 blocks and {least[1_000_000]} us at 1,000,000" in " ".join(text.split())
    single = [max(run["cpu_us"] for run in calls[blocks]["runs"]) for blocks in (10_000, 1_000_000)]
    assert f"the longest took {single[0]:.0f} and {single[1]:.0f} us" in " ".join(text.split())
    bytes_a_block = sorted(row["bookkeeping_bytes_a_block"] for row in calls.values())
    assert f"{bytes_a_block[0]:.0f} to {bytes_a_block[1]:.0f} bytes" in text
    assert all(row["closest_to_its_limit"]["us"] <= row["closest_to_its_limit"]["allowed_us"] for row in calls.values())
