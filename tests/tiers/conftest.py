"""What every test of tiers has."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a load late where a test is about something else."""
    monkeypatch.setattr("kvpool.tiers.transfer.LATENCY_S", 20.0)
