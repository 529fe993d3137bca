"""Continuous batching on a paged cache: `Engine` from Python, `kvpool run` and `kvpool serve` on top of it."""

from __future__ import annotations

from kvpool.engine.engine import Engine
from kvpool.engine.request import Answer, Event, Params
from kvpool.engine.sampler import Sampling

__all__ = ["Answer", "Engine", "Event", "Params", "Sampling"]
