"""The tables of docs/performance.md are those of the measured results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    yield tables
    sys.modules.pop("tables")


def test_the_page_shows_the_results(tables) -> None:  # type: ignore[no-untyped-def]
    text = tables.PAGE.read_text()
    assert tables.filled(text, json.loads(tables.RESULTS.read_text())) == text, "run python benchmarks/tables.py"
    assert set(tables.TABLES) == {place[2] for place in tables.PLACE.finditer(text)}


def test_a_peer_is_shown_at_its_best_block_size(tables) -> None:  # type: ignore[no-untyped-def]
    common = {"case": "decode", "codec": "bf16", "q_heads": 32, "vllm_kernel": "vec"}
    rows = [
        common | {"tokens_per_block": 64, "best_us": 10.0, "vllm_tokens_per_block": 64, "vs_peer": {"vllm": 3.0}},
        common | {"tokens_per_block": 128, "best_us": 8.0, "vllm_tokens_per_block": 128, "vs_peer": {"vllm": 3.0}},
    ]
    last = tables.peers({"peers": {"rows": rows}}).splitlines()[-1]
    assert last == "| decode | bf16 | 128 | 8 | vec | 128 | 24 | 3 |"
