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
    assert results["topics"]["scored_tokens"] >= 2_000
    assert results["licence"]["scored_tokens"] == 127
    licence = {row["codec"]: row["kl"] for row in results["licence"]["rows"]}
    topics = {row["codec"]: row["kl"] for row in results["topics"]["rows"]}
    assert licence["int8+smoothing+rotation"] <= 0.0005
    assert licence["fp8+smoothing+rotation"] <= 0.006
    assert topics["nvfp4-token+smoothing+rotation"] <= 0.06
