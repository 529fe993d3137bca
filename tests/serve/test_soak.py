"""The soak of benchmarks/soak.py: seconds of it here; ten minutes when slow tests are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import soak


@pytest.mark.model
def test_seconds_of_mixed_traffic_leave_nothing_behind():
    assert soak.run(requests=48, seconds=4.0, seed=1, samples=4)["failures"] == []


@pytest.mark.slow
def test_ten_minutes_of_mixed_traffic_leave_nothing_behind():
    report = soak.run(requests=2000, seconds=600.0, seed=0, samples=100)
    assert report["failures"] == []
    assert len(report["refusals"]) == len(soak.MISTAKES)
