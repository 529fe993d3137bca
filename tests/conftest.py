"""Options of the test suite."""

from __future__ import annotations

import os

import pytest

# Triton is interpreted or compiled for the life of a process, from its first import; tests/triton compiles in its own.
os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storm-seed", type=int, default=None, help="seed of tests/storm, as a failure printed it")
