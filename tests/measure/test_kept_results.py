"""Tables of figures in the documents are made from the kept results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["decode_profile", "decode_caches", "growth_vs_llamacpp", "steps_in_flight"])
def test_the_table_of_a_document_is_the_one_of_the_results(name: str) -> None:
    benchmark = load(name)
    assert benchmark.table(json.loads(benchmark.RESULTS.read_text())) in benchmark.DOCS.read_text()


def test_the_kept_soak_is_a_whole_one_without_failures() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "soak.json").read_text())
    assert report["failures"] == []
    assert (report["requests"], report["seconds"]) == (2000, 600.0)
    assert report["scheduler_cpu_ms"]["p99_at_most"] <= 5


def test_python_takes_a_small_share_of_a_decode_step() -> None:
    for point in json.loads((ROOT / "benchmarks" / "results" / "decode_profile.json").read_text())["points"]:
        assert point["ms"]["layers"] + point["ms"]["scheduler"] < 0.05 * sum(point["ms"].values())


def test_kvpool_is_the_fastest_cache_from_2048_tokens_up() -> None:
    benchmark = load("decode_caches")
    points = json.loads(benchmark.RESULTS.read_text())["points"]
    assert {(p["context"], p["batch"]) for p in points} == {(c, b) for c in (512, 2048, 6144) for b in (1, 8)}
    for point in points:
        ms = {name: row["ms"] for name, row in point["caches"].items()}
        theirs = [ms[name] for name in benchmark.THEIRS if name in ms]
        if point["context"] >= 2048:
            assert max(ms[name] for name in benchmark.KVPOOL) < min(theirs)
            assert max(ms["kvpool int8"], ms["kvpool fp8"]) <= ms["kvpool bf16"]
        if (point["context"], point["batch"]) == (6144, 8):
            assert 4.5 * ms["kvpool bf16"] < ms["DynamicCache"]
            assert 5 * ms["kvpool fp8"] < ms["QuantizedCache fp8"]


def test_the_first_page_shows_the_figures_of_the_largest_point() -> None:
    page = (ROOT / "README.md").read_text()
    points = json.loads(load("decode_caches").RESULTS.read_text())["points"]
    (point,) = [p for p in points if (p["context"], p["batch"]) == (6144, 8)]
    for name, row in point["caches"].items():
        if name != "model alone":
            assert f"{name} | {row['ms']:,.0f} | {row['bytes'] / 1e6:,.0f} MB |" in page
