"""The GPU check: all of it where there is a GPU, a rehearsal of its shortest parts elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "check"

pytestmark = pytest.mark.long


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")} | (environment or {})
    return subprocess.run([sys.executable, str(CHECK), *arguments], capture_output=True, text=True, env=given)


def test_blocks_beyond_two_billion_elements_are_where_they_should_be(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path), "--only", "high_ids")
    assert not done.returncode, done.stdout + done.stderr
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert [(c["check"], c["result"]) for c in checks] == [("high_ids", "ok")]


def test_what_is_missing_is_said_in_a_line_each_and_stops_no_other_check(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(\"No module named 'transformers'\")\n")
    without = {"PYTHONPATH": str(tmp_path)}
    done = run("--dry-run", "--out", str(tmp_path), "--only", "tiers", "memory", "steps_in_flight", environment=without)
    lines = [line for line in done.stdout.splitlines() if line.startswith("not here: ")]
    assert len(lines) == len({line.split()[2] for line in lines})
    assert any(line.startswith("not here: flashinfer-python (bench_attention") for line in lines) or _has("flashinfer")
    assert any("carry it: tests/gpu/carry DIR" in line for line in lines) or _has("cuda.bindings")
    results = {c["check"]: c for c in json.loads((tmp_path / "gpu-check.json").read_text())["checks"]}
    assert results["tiers"]["result"] == results["memory"]["result"] == "ok"
    assert results["steps_in_flight"]["result"] == "not run"
    assert "No module named 'transformers'" in results["steps_in_flight"]["detail"]


def test_a_folder_that_is_too_large_or_none_is_refused_in_one_line(tmp_path: Path) -> None:
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(60_000_001)
    for folder in (tmp_path, tmp_path / "nothing"):
        done = run("--dry-run", "--carried", str(folder))
        assert done.returncode == 1
        assert done.stderr.startswith(f"--carried {folder} must be a folder of at most 60000000 bytes")
        assert len(done.stderr.splitlines()) == 1


def _has(module: str) -> bool:
    from needs import present

    return present(module)


@pytest.mark.slow
def test_everything_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path), "--seconds", "3000")
    assert not done.returncode, done.stdout + done.stderr
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert all(c["result"] == "ok" for c in checks)
    assert len(checks) == 15
    assert json.loads((tmp_path / "gpu-dry-run.json").read_text())["attention"]


@pytest.mark.gpu
def test_a_gpu_shows_that_the_backend_is_right(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    print(done.stdout)
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-2000:]
