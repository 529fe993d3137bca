"""Options of the test suite."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

# Triton is interpreted or compiled for the life of a process, from its first import; tests/triton compiles in its own.
os.environ["TRITON_INTERPRET"] = "1"
#: The storm needs a ledger to blow over.
collect_ignore = [] if find_spec("kvpool.ledger") else ["storm"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storm-seed", type=int, default=None, help="seed of tests/storm, as a failure printed it")
