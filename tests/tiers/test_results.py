"""What docs/tiers.md says was measured is what the results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join((ROOT / "docs" / "tiers.md").read_text().split())


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_table_of_rates_is_the_benchmark_s() -> None:
    for row in result("tiers")["rows"]:
        line = f"| {row['case']} | {row['gb_s']:.2f} | {row['peer']} | {row['peer_gb_s']:.2f} | {row['ratio']:.2f} |"
        assert line in TEXT
        assert row["holds"], f"{row['case']} is below 80 % of the plain way"


def test_the_time_of_a_restore_is_the_benchmark_s() -> None:
    row = result("restore")
    assert f"{row['tokens']:,} tokens of the embedded model" in TEXT
    assert f"in {1e3 * row['restore_s']:.1f} ms and are computed in {1e3 * row['compute_s']:,.0f} ms" in TEXT
    assert f"({row['ratio']:.0f} times); the whole second answer takes {1e3 * row['again_s']:.0f} ms" in TEXT
    assert row["ratio"] >= 20


def test_the_replay_of_the_trace_is_the_benchmark_s() -> None:
    both, large, small = result("replay_host")["rows"]
    rates = [f"{row['hit_rate']:.2%}".replace("%", " %") for row in (both, large, small)]
    assert f"find {rates[0]} of all prompt tokens" in TEXT
    assert f"alone {rates[1]}, one of 1,000 alone {rates[2]}" in TEXT
    host = both["tiers"]["host"]
    assert f"{host['blocks_down']:,} blocks go down and {host['blocks_up']:,} come up" in TEXT
    assert abs(both["hit_rate"] - large["hit_rate"]) <= 0.005


def test_the_table_of_formats_below_is_what_was_measured() -> None:
    rows = {row["codec"]: row for row in result("tier_formats")["rows"]}
    for name, row in rows.items():
        shown = f"{row['perplexity_change']:+.2%} | {row['top1_agreement']:.1%}".replace("%", " %")
        line = f"| `{name}` | {row['bits_per_element']:g} | {shown} | {row['kl']:.4f} |"
        assert line in TEXT or name == "bf16"
    below = [row for name, row in rows.items() if ">" in name]
    assert len(below) == 3
    for row in below:
        assert row["kl"] < 0.15 * rows[row["codec"].partition(">")[2]]["kl"]
