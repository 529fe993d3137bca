"""`kvpool replay`: hit rate of a request trace by capacity and policy, beside what no policy can beat."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.progress import bar
from kvpool.errors import PlanError
from kvpool.ledger import POLICIES
from kvpool.measure.replay import Row, load_trace, optimum_rates, replay


def numbers(text: str, option: str) -> list[int]:
    """Parse `1000,10000`."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise PlanError(f"{option} takes positive numbers such as 1000,10000, got {text!r}")
    return found


def replay_trace(
    trace: Annotated[
        Path, typer.Argument(help="jsonl: hash_ids and input_length (Mooncake), or token_ids", exists=True)
    ],
    blocks: Annotated[str, typer.Option(help="Capacities in blocks")] = "1000,10000,50000",
    policy: Annotated[str, typer.Option(help=f"Of {', '.join(POLICIES)}; several with commas")] = "lru",
    tokens_per_block: Annotated[int | None, typer.Option(help="Default: --tokens-per-id for hash ids, else 16")] = None,
    tokens_per_id: Annotated[int, typer.Option(help="Token ids that stand for one hash id")] = 16,
    window: Annotated[int | None, typer.Option(help="Add layers with a sliding window of so many tokens")] = None,
    live: Annotated[int, typer.Option(help="Requests that hold blocks at once; 1 counts as simulators do")] = 1,
    limit: Annotated[int | None, typer.Option(help="Read at most so many requests")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate against capacity into this file")] = None,
) -> None:
    """Replay a request trace through the real ledger and size a cache with it."""
    names = policy.split(",")
    for name in names:
        if name not in POLICIES:
            raise PlanError(f"--policy takes {', '.join(POLICIES)}, got {name!r}")
    capacities = numbers(blocks, "--blocks")
    with bar("reading") as shown:
        requests = load_trace(trace, tokens_per_id=tokens_per_id, limit=limit)
        if not requests:
            raise PlanError(f"{trace} holds no request")
        block = tokens_per_block or (tokens_per_id if requests[0].scale != 1.0 else 16)
        shown.expect(len(names) * len(capacities) + 1)
        rows = []
        for name, capacity in product(names, capacities):
            row = replay(
                requests,
                capacity,
                policy=name,
                tokens_per_block=block,
                window=window,
                live=live,
                whole_blocks=live == 1,
            )
            rows.append(row)
            shown.advance(f"{name}, {capacity:,} blocks")
        best, infinite = optimum_rates(requests, capacities, block)
        shown.advance("optimum")
    if plot is not None:
        draw(rows, best, infinite, plot)
    if as_json:
        optimum = {str(c): rate for c, rate in best.items()}
        print(json.dumps({"rows": [asdict(r) for r in rows], "optimum": optimum, "infinite": infinite}))
    else:
        show(rows, best, infinite, len(requests))


def show(rows: list[Row], best: dict[int, float], infinite: float, num_requests: int) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    title = f"{num_requests} requests; endless cache {infinite:.4f}; p50 / p99 of each call in us"
    calls = ("lookup", "allocate", "release")
    table = Table(title=title)
    for column in ("policy", "blocks", "hit rate", "optimum", "requests/s", "blocks/s", *calls):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for r in rows:
        times = [f"{r.calls_us[c][0]:.1f} / {r.calls_us[c][1]:.1f}" for c in calls]
        table.add_row(
            r.policy, f"{r.blocks:,}", f"{r.hit_rate:.4f}", f"{best[r.blocks]:.4f}", f"{r.requests_per_s:,.0f}",
            f"{r.blocks_per_s:,.0f}", *times,
        )  # fmt: skip
    Console().print(table)


def draw(rows: list[Row], best: dict[int, float], infinite: float, path: Path) -> None:
    """Draw hit rate against capacity, the optimum beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(r.policy for r in rows):
        points = sorted((r.blocks, r.hit_rate) for r in rows if r.policy == name)
        axes.plot([c for c, _ in points], [h for _, h in points], marker="o", label=name)
    axes.plot(sorted(best), [best[c] for c in sorted(best)], "k--", label="optimum (offline)")
    axes.axhline(infinite, color="grey", linewidth=0.8, label="endless cache")
    axes.set(xscale="log", xlabel="blocks", ylabel="hit rate", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
