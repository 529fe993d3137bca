"""The examples run, and their own assertions hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Example -> arguments that make it short; None where it needs none.
SHORT = {
    "beam_search.py": [],
    "long_chat.py": ["--tiny"],
    "long_document.py": ["--tokens", "3000"],
    "new_codec.py": None,  # tests/codecs runs it
}


def run(example: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVPOOL_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("example", [name for name, arguments in SHORT.items() if arguments is not None])
def test_an_example_runs(example: str) -> None:
    assert run(example, *(SHORT[example] or []))


@pytest.mark.slow
def test_a_document_of_32k_tokens_is_read_once() -> None:
    lines = run("long_document.py").splitlines()
    assert lines[0].startswith("question 1: 0 tokens found")
    assert all("32,768 tokens found" in line for line in lines[1:3])


def test_every_example_is_known() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SHORT)
