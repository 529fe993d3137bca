"""Real model configurations, the bytes expected of them, and small models, for the tests of specs and plans."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvpool.kinds import KVKind, LatentKind, LayerSpec, Lifetime, StateKind
from kvpool.spec import CacheSpec

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


def model(name: str) -> CacheSpec:
    """The spec of one configuration."""
    return CacheSpec.from_config(config(name))


def uniform(kv: KVKind | LatentKind = KVKind(2, 64), layers: int = 2, **fields: Any) -> CacheSpec:  # noqa: B008
    """Layers that all store the same."""
    return CacheSpec((LayerSpec((kv,)),) * layers, **{"max_seq_len": 4096, **fields})


#: A full layer, one with a window, one with two states.
HYBRID = CacheSpec(
    (
        LayerSpec((KVKind(2, 64),)),
        LayerSpec((KVKind(2, 64),), Lifetime(window=128)),
        LayerSpec((StateKind("conv", (96, 3), "bf16", ((96, 1),)), StateKind("ssm", (4, 16, 32), "fp32", ((4, 1),)))),
    ),
    max_seq_len=4096,
)
