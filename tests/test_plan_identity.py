"""Fingerprints, block formats, and plans as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvpool.codecs import CODECS
from kvpool.errors import PlanError
from kvpool.kinds import KVKind
from kvpool.plan import Plan, make_plan
from kvpool.spec import CacheSpec
from model_data import HYBRID, config, uniform


def test_a_plan_survives_json() -> None:
    for codec in CODECS:
        plan = make_plan(uniform(KVKind(2, 128)), "64MiB", codec=codec, host_budget="1GiB")
        assert Plan.from_json(plan.to_json()) == plan
    plan = make_plan(HYBRID, "64MiB", tp_size=2, layers=range(3))
    assert Plan.from_json(plan.to_json()) == plan


def test_fingerprints_are_equal_in_another_process_and_ignore_what_moves_no_byte() -> None:
    spec = config("openai__gpt-oss-20b")
    plan = make_plan(CacheSpec.from_config(spec), "1GiB", codec="fp8")
    code = (
        f"from kvpool.spec import CacheSpec; from kvpool.plan import make_plan; import json;"
        f"p = make_plan(CacheSpec.from_config({spec!r}), '1GiB', codec='fp8'); print(p.fingerprint, p.block_format)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [plan.fingerprint, plan.block_format]
    renamed = CacheSpec.from_config({**spec, "model_type": "renamed", "_source": "elsewhere"})
    assert make_plan(renamed, "1GiB", codec="fp8").fingerprint == plan.fingerprint


def test_a_block_format_ignores_counts_and_budgets_and_nothing_else() -> None:
    base = make_plan(HYBRID, "64MiB", tp_size=2)
    for same in (
        {"budget": "1GiB"},
        {"max_budget": "2GiB"},
        {"host_budget": "1GiB"},
        {"max_sequences": 9},
        {"max_seq_len": 2048, "typical_seq_len": 2048},
        {"shares": {"full": 0.8, "window": 0.1, "state": 0.1}},
    ):
        other = make_plan(HYBRID, **{"budget": "64MiB", "tp_size": 2, **same})
        assert other.block_format == base.block_format, same
        assert other.fingerprint != base.fingerprint, same
    for different in ({"codec": "fp8"}, {"layout": "NHD"}, {"tokens_per_block": 64}, {"tp_rank": 1}, {"tp_size": 1},
                      {"layers": range(2)}, {"layer_first": True}):  # fmt: skip
        other = make_plan(HYBRID, **{"budget": "64MiB", "tp_size": 2, **different})
        assert other.block_format != base.block_format, different


def test_damaged_plans_are_refused() -> None:
    plan = make_plan(HYBRID, "64MiB")
    good = json.loads(plan.to_json())

    def refused(change: Any) -> None:
        data = json.loads(plan.to_json())
        change(data)
        with pytest.raises(PlanError):
            Plan.from_json(json.dumps(data))

    refused(lambda d: d.update(format=99))
    refused(lambda d: d.update(fingerprint="0" * 64))
    refused(lambda d: d["plan"].update(budget_bytes=1))
    refused(lambda d: d["plan"].update(budget_bytes="many"))
    refused(lambda d: d["plan"].pop("tp_size"))
    refused(lambda d: d["plan"].update(extra=1))
    refused(lambda d: d["plan"]["groups"][0].update(num_blocks=10**9))
    refused(lambda d: d["plan"]["groups"][0]["pools"][0]["planes"][0].update(offset=128))
    refused(lambda d: d["plan"]["groups"][0]["pools"][0]["kind"].update(type="StateKind"))
    refused(lambda d: d.update(plan=[]))
    for text in ("", "{", "[]", "null", good["fingerprint"]):
        with pytest.raises(PlanError):
            Plan.from_json(text)


def test_a_plan_with_moved_planes_is_refused_even_with_a_fresh_fingerprint() -> None:
    from dataclasses import replace

    plan = make_plan(uniform(), "64MiB", codec="fp8")
    (group,) = plan.groups
    (pool,) = group.pools
    moved = replace(pool.planes[1], offset=0)
    forged = replace(plan, groups=(replace(group, pools=(replace(pool, planes=(pool.planes[0], moved)),)),))
    with pytest.raises(PlanError, match="planes in places"):
        Plan.from_json(forged.to_json())
