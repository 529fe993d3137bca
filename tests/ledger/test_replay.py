"""Replays through the real ledger: hit rates that an independent simulator gives, and the optimum beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import SpecError
from kvpool.measure.optimum import block_chains, infinite_hits, optimum_hits
from kvpool.measure.replay import Request, load_trace, optimum_rates, replay, save_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
PUBLISHED = {
    "conversation": ({1000: 0.046, 5000: 0.121, 10000: 0.219}, {1000: 0.183, 5000: 0.346, 10000: 0.373}),
    "synthetic": ({1000: 0.087, 5000: 0.290, 10000: 0.443}, {1000: 0.274, 5000: 0.535, 10000: 0.628}),
}


def brute_force(chains: list[list[int]], num_blocks: int) -> list[int]:
    """Belady on prefix trees, each choice by looking at the whole future."""
    cached: dict[int, int] = {}  # block -> parent
    hits = []
    for at, chain in enumerate(chains):
        found = 0
        while found < len(chain) and chain[found] in cached:
            found += 1
        hits.append(found)
        while len(cached) + len(chain) - found > num_blocks:
            leaves = [b for b in cached if b not in cached.values() and b not in chain]

            def next_use(b: int, at: int = at) -> int:
                return next((i for i in range(at + 1, len(chains)) if b in chains[i]), 10**9)

            depth = {b: max((c.index(b) for c in chains if b in c), default=0) for b in leaves}
            victim = max(leaves, key=lambda b: (next_use(b), depth[b], -b))
            del cached[victim]
        for i, b in enumerate(chain):
            cached[b] = chain[i - 1] if i else -1
    return hits


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_belady_s(seed: int) -> None:
    r = random.Random(seed)
    requests = [np.array([r.randrange(2) for _ in range(r.randrange(2, 12))], np.int32) for _ in range(40)]
    chains = block_chains(requests, 2)
    for blocks in (6, 9, 14):
        assert sum(optimum_hits(chains, blocks)) == sum(brute_force(chains, blocks))
    assert sum(optimum_hits(chains, 10**6)) == sum(infinite_hits(chains))


@pytest.mark.long
def test_no_policy_beats_the_optimum_nor_the_endless_cache() -> None:
    r = random.Random(5)
    requests = []
    for _ in range(300):
        tokens = np.array([r.randrange(3) for _ in range(4 * r.randrange(1, 8))], np.int32)
        requests.append(Request(tokens, len(tokens), 1.0))
    best, infinite = optimum_rates(requests, [20, 60], 4)
    for policy in ("lru", "lfu", "fifo", "cost", "count-lru"):
        for blocks in (20, 60):
            row = replay(requests, blocks, policy=policy, tokens_per_block=4, live=1, whole_blocks=True)
            assert row.hit_rate <= best[blocks] + 1e-12 <= infinite + 2e-12


def test_a_trace_is_read_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        json.dumps({"input_length": 1100, "hash_ids": [5, 6, 9]}) + "\n" + json.dumps({"token_ids": [1, 2, 3]}) + "\n"
    )
    first, second = load_trace(path, tokens_per_id=4)
    assert first.tokens.tolist() == [20, 21, 22, 23, 24, 25, 26, 27]
    assert (first.num_tokens, first.scale) == (1100, 128.0)
    assert second.tokens.tolist() == [1, 2, 3]
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(SpecError, match=r"t\.jsonl:1 is no request"):
        load_trace(path)


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    save_trace(tmp_path / "t.jsonl", [[5, 6, 7], [2**31 - 1]], [9, 0])
    read = load_trace(tmp_path / "t.jsonl")
    assert [(r.tokens.tolist(), r.num_tokens, r.scale) for r in read] == [([5, 6, 7], 3, 1.0), ([2**31 - 1], 1, 1.0)]


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize("trace", PUBLISHED)
def test_hit_rates_and_optimum_are_those_of_an_independent_simulator(trace: str) -> None:
    requests = load_trace(TRACES / f"{trace}_trace.jsonl")
    rates, best = PUBLISHED[trace]
    for blocks, rate in rates.items():
        assert replay(requests, blocks, live=1, whole_blocks=True).hit_rate == pytest.approx(rate, abs=6e-4)
    found, _ = optimum_rates(requests, list(best), 16)
    for blocks, rate in best.items():
        assert found[blocks] == pytest.approx(rate, abs=6e-4)


@pytest.mark.long
def test_the_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvpool.cli import main

    path = tmp_path / "t.jsonl"
    lines = [{"input_length": 2048, "hash_ids": [0, 1, 2 + i % 3, 9 + i]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SystemExit) as done:
        main(
            [
                "replay",
                str(path),
                "--blocks",
                "8,64",
                "--policy",
                "lru,count-lru",
                "--json",
                "--plot",
                str(tmp_path / "p.png"),
            ]
        )
    assert not done.value.code
    found = json.loads(capsys.readouterr().out)
    assert [(r["policy"], r["blocks"]) for r in found["rows"]] == [
        ("lru", 8), ("lru", 64), ("count-lru", 8), ("count-lru", 64),
    ]  # fmt: skip
    assert found["optimum"]["64"] == found["infinite"] == found["rows"][1]["hit_rate"]
    assert {"hit_rate", "requests_per_s", "blocks_per_s", "p50_us", "p99_us"} <= set(found["rows"][0])
    assert set(found["rows"][0]["calls_us"]) == {"lookup", "open", "allocate", "commit", "release"}
    assert all(0 < p50 <= p99 for p50, p99 in found["rows"][0]["calls_us"].values())
    assert (tmp_path / "p.png").stat().st_size > 1000
    with pytest.raises(SystemExit) as done:
        main(["replay", str(path), "--policy", "mru"])
    assert done.value.code == 2
    assert "--policy takes lru" in capsys.readouterr().err
