"""Plans: budgets, sizes, places and what they serialise to."""

from __future__ import annotations

import pytest

from kvpool.errors import PlanError
from kvpool.plan import Plan, make_plan
from kvpool.spec import CacheSpec

LLAMA2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


def test_a_budget_of_69_524_783_104_bytes_holds_132_608_tokens_of_llama_2_7b() -> None:
    plan = make_plan(CacheSpec.from_config(LLAMA2_7B), 69_524_783_104, tokens_per_block=64)
    assert plan.groups[0].num_blocks == 2072
    assert plan.num_tokens == 132_608
    assert plan.bound_by == "budget"


def test_a_plan_survives_json() -> None:
    plan = make_plan(CacheSpec.from_config(LLAMA2_7B), "4GiB", host_budget="1GiB")
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("budget", [-1, 0, "x", "4 XiB", 2**70])
def test_a_bad_budget_is_refused(budget: int | str) -> None:
    with pytest.raises(PlanError, match="budget"):
        make_plan(CacheSpec.from_config(LLAMA2_7B), budget)
