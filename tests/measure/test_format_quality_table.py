"""The table of docs/choosing-a-format.md is the one made from the kept results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("format_quality", ROOT / "benchmarks" / "format_quality.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_docs_is_made_from_the_results(benchmark: ModuleType) -> None:
    results = json.loads(benchmark.RESULTS.read_text())
    page = benchmark.DOCS.read_text()
    assert benchmark.table(results) in page
    assert all(mark in page for mark in benchmark.MARKS)


def test_the_results_hold_what_was_promised(benchmark: ModuleType) -> None:
    results = json.loads(benchmark.RESULTS.read_text())
    kl = {
        name: {row["codec"]: row["kl"] for row in results[name]["rows"]}
        for name in benchmark.MEASUREMENTS
        if name in results
    }
    assert results["topics_stored"]["scored_tokens"] >= 2_000
    licence = results["licence_exact"]
    assert (licence["scored_tokens"], licence["prefix_tokens"], licence["prefill"]) == (127, 512, "exact")
    assert kl["licence_exact"]["int8+smoothing+rotation"] <= 0.0005
    assert kl["licence_exact"]["fp8+smoothing+rotation"] <= 0.006
    assert kl["topics_stored"]["nvfp4-token+smoothing+rotation"] <= 0.06
