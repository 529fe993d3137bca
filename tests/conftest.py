"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storm-seed", type=int, default=None, help="seed of tests/storm, as a failure printed it")
