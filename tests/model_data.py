"""Real model configurations and the bytes expected of them, for the tests of specs and plans."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Config:
    """One line of `model_configs.jsonl`: the fields of a `config.json` that decide about cache and weights."""

    name: str
    config: dict[str, Any]
    quantisation: dict[str, Any]


@cache
def configs() -> dict[str, Config]:
    lines = (json.loads(line) for line in (DATA / "model_configs.jsonl").read_text().splitlines())
    return {x["name"]: Config(x["name"], x["config"], x.get("quantisation", {})) for x in lines}


def config(name: str) -> dict[str, Any]:
    """A fresh copy of one configuration."""
    return json.loads(json.dumps(configs()[name].config))  # type: ignore[no-any-return]


@cache
def expected() -> list[dict[str, str]]:
    with (DATA / "planner_expected.csv").open() as file:
        return list(csv.DictReader(file))
