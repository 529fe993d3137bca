"""The GPU check: all of it where there is a GPU, a rehearsal of its shortest parts elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "check"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    return subprocess.run([sys.executable, str(CHECK), *arguments], capture_output=True, text=True, env=environment)


def test_blocks_beyond_two_billion_elements_are_where_they_should_be(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path), "--only", "high_ids")
    assert not done.returncode, done.stdout + done.stderr
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert [(c["check"], c["result"]) for c in checks] == [("high_ids", "ok")]


@pytest.mark.slow
def test_everything_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path), "--seconds", "3000")
    assert not done.returncode, done.stdout + done.stderr
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert all(c["result"] == "ok" for c in checks)
    assert len(checks) == 13
    assert json.loads((tmp_path / "gpu-dry-run.json").read_text())["attention"]


@pytest.mark.gpu
def test_a_gpu_shows_that_the_backend_is_right(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    print(done.stdout)
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-2000:]
