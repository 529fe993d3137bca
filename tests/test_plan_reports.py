"""Sizing cases that public reports got wrong elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvpool.errors import PlanError
from kvpool.kinds import KVKind, Lifetime
from kvpool.plan import make_plan
from kvpool.spec import CacheSpec
from model_data import HYBRID, model, uniform

GIB = 2**30


def test_fp8_data_is_exactly_half_and_its_scales_are_listed_apart() -> None:
    spec = model("meta-llama__Meta-Llama-3.1-8B")
    (wide,), (narrow,) = (make_plan(spec, "4GiB", codec=c).groups[0].pools for c in ("bf16", "fp8"))
    assert narrow.plane("data").bytes_per_block * 2 == wide.plane("data").bytes_per_block
    assert narrow.plane("scale").bytes_per_block == 2 * 32 * 8 * 32 * 4


@pytest.mark.parametrize(("heads", "ranks", "want"), [(2, 4, 1), (8, 16, 1), (8, 4, 2), (8, 1, 8), (8, 8, 1)])
def test_kv_heads_split_over_ranks_and_repeat_when_fewer(heads: int, ranks: int, want: int) -> None:
    for rank in (0, ranks - 1):
        plan = make_plan(uniform(KVKind(heads, 64)), "1GiB", tp_size=ranks, tp_rank=rank)
        assert plan.groups[0].pools[0].num_heads == want


@pytest.mark.parametrize(("heads", "ranks"), [(4, 6), (3, 2), (8, 12)])
def test_heads_that_do_not_divide_are_refused_when_planning(heads: int, ranks: int) -> None:
    with pytest.raises(PlanError, match=f"{heads} KV heads cannot be split over tp_size={ranks}"):
        make_plan(uniform(KVKind(heads, 64)), "1GiB", tp_size=ranks)


def test_a_window_as_long_as_the_longest_sequence_makes_no_group_of_its_own() -> None:
    spec = model("mlc__gemma3_1b_it")
    for longest in (511, 512):
        (group,) = make_plan(spec, "1GiB", max_seq_len=longest).groups
        assert (group.name, len(group.pools), len(group.layers)) == ("full", 1, 26)
    plan = make_plan(spec, "1GiB", max_seq_len=513)
    assert [group.name for group in plan.groups] == ["full", "window-512"]
    notes = make_plan(spec, "1GiB", max_seq_len=511).notes
    assert any("22 layers have a window or chunk not shorter than max_seq_len 511" in note for note in notes)


def test_max_tokens_are_rounded_up_to_blocks_and_both_numbers_are_said() -> None:
    plan = make_plan(model("mlc__llama2_7b"), max_tokens=10_718, tokens_per_block=16)
    assert (plan.groups[0].num_blocks, plan.num_tokens, plan.bound_by) == (670, 10_720, "max_tokens")
    assert any("10718" in note and "10720" in note for note in plan.notes)


def test_the_lesser_of_two_limits_binds_and_the_budget_is_never_passed() -> None:
    spec = model("mlc__llama2_7b")
    block = 16 * 524_288
    plenty = make_plan(spec, block * 1000, max_tokens=10_718, tokens_per_block=16)
    assert (plenty.bound_by, plenty.groups[0].num_blocks, plenty.budget_bytes) == ("max_tokens", 670, block * 1000)
    exact = make_plan(spec, block * 670, max_tokens=10_718, tokens_per_block=16)
    assert (exact.bound_by, exact.groups[0].num_blocks) == ("max_tokens", 670)
    short = make_plan(spec, block * 670 - 1, max_tokens=10_718, tokens_per_block=16)
    assert (short.bound_by, short.groups[0].num_blocks) == ("budget", 669)
    assert short.used_bytes <= short.budget_bytes


def test_blocks_are_counted_from_the_stride_of_a_block_not_from_one_plane() -> None:
    plan = make_plan(model("deepseek-ai__DeepSeek-V3.2"), "4GiB", codec="fp8")
    (group,) = plan.groups
    assert {plane.strides[0] for pool in group.pools for plane in pool.planes} == {group.bytes_per_block}
    assert group.num_blocks == plan.budget_bytes // group.bytes_per_block


@pytest.mark.parametrize("dim", [64, 80, 96, 100, 112, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "nvfp4"])
def test_odd_head_sizes_work_or_are_refused_with_the_reason(dim: int, codec: str) -> None:
    spec = uniform(KVKind(3, dim))
    if codec == "nvfp4" and dim % 16:
        with pytest.raises(PlanError, match=f"{dim} must be a multiple of 16"):
            make_plan(spec, "1GiB", codec=codec)
        return
    (group,) = make_plan(spec, "1GiB", codec=codec).groups
    bits = {"bf16": 16 * dim, "fp8": 8 * dim + 32, "int8": 8 * dim + 32, "nvfp4": 4 * dim + 8 * dim // 16}[codec]
    assert group.payload_bytes_per_block * 8 == 2 * 2 * 3 * 32 * bits


def test_states_that_limit_the_sequences_of_a_step_are_named_with_their_number() -> None:
    plan = make_plan(HYBRID, num_blocks={"full": 40_000, "window": 40_000, "state": 614}, max_sequences=1024)
    (note,) = (note for note in plan.notes if "max_sequences" in note)
    for word in ("1024", "614", "state", "307"):
        assert word in note
    assert plan.sequences(100) == plan.sequences(4096)
    assert (plan.sequences(100).value, plan.sequences(100).limited_by) == (307, "state")


def test_the_table_shows_every_factor_of_the_bytes() -> None:
    text = str(make_plan(model("mlc__qwen2_1_5b"), "1GiB"))
    assert "2 (k+v) x 28 layers x 2 heads x 128 data x 2 B = 28,672" in text


@pytest.mark.parametrize("spec", [HYBRID, model("openai__gpt-oss-20b"), model("mlc__llama2_7b")])
def test_tokens_are_sequences_times_length_by_one_rule(spec: CacheSpec) -> None:
    plan = make_plan(spec, "2GiB", typical_seq_len=2048)
    count = plan.sequences(2048).value
    assert count * 2048 <= plan.num_tokens < (count + 1) * 2048
    if plan.groups[0].lifetime == Lifetime() and len(plan.groups) == 1:
        assert plan.num_tokens == plan.groups[0].num_blocks * plan.tokens_per_block


def test_a_sequence_too_long_for_the_cache_is_named_with_the_bytes_it_needs() -> None:
    spec = uniform(KVKind(8, 128), 32)
    plan = make_plan(spec, num_blocks=229, tokens_per_block=16, max_seq_len=4096)
    (note,) = (note for note in plan.notes if "does not fit" in note)
    for word in ("4096", "3664", str(256 * 16 * 131_072), "raise the budget", "lower max_seq_len"):
        assert word in note
    assert plan.longest_sequence().value == 3664


NOT_DEFAULT: dict[str, Any] = {
    "budget": "3GiB",
    "codec": "fp8",
    "layout": "NHD",
    "layer_first": True,
    "tokens_per_block": 64,
    "max_seq_len": 2048,
    "typical_seq_len": 1024,
    "max_budget": "4GiB",
    "max_sequences": 7,
    "max_step_tokens": 333,
    "num_draft": 3,
    "checkpoint_interval": 512,
    "host_budget": "1GiB",
    "disk_budget": "2GiB",
    "tp_rank": 1,
    "tp_size": 2,
    "layers": range(3),
    "device": "cuda:1",
    "shares": {"full": 0.5, "window": 0.25, "state": 0.25},
}


def test_every_argument_reaches_the_plan() -> None:
    plan = make_plan(HYBRID, **NOT_DEFAULT)
    assert plan.budget_bytes == 3 * GIB
    assert plan.max_budget_bytes == 4 * GIB
    assert plan.device == "cuda:1"
    assert plan.granule_bytes == 2 * 2**20
    for name in ("tokens_per_block", "max_seq_len", "typical_seq_len", "max_sequences", "max_step_tokens", "num_draft",
                 "checkpoint_interval", "tp_rank", "tp_size", "layers"):  # fmt: skip
        assert getattr(plan, name) == NOT_DEFAULT[name], name
    assert [(t.name, t.budget_bytes) for t in plan.tiers] == [("host", GIB), ("disk", 2 * GIB)]
    for group in plan.groups:
        assert group.layer_first
        assert all(pool.layout == "NHD" for pool in group.pools)
    assert plan.groups[0].pools[0].codec == "fp8"
    share = plan.groups[0].committed_bytes(plan.groups[0].num_blocks, plan.granule_bytes) / plan.budget_bytes
    assert 0.49 < share < 0.53


def test_every_argument_of_make_plan_changes_the_fingerprint_and_an_unknown_one_raises() -> None:
    names = set(inspect.signature(make_plan).parameters) - {"spec", "memory_fraction", "max_tokens", "num_blocks"}
    assert names == set(NOT_DEFAULT)
    base = {"budget": "2GiB", "tp_size": 2}
    plain = make_plan(HYBRID, **base).fingerprint
    for name, value in NOT_DEFAULT.items():
        if name == "layers":
            value = range(2)
        changed = {**base, name: value}
        if name == "tp_size":
            changed["tp_size"] = 1
        assert make_plan(HYBRID, **changed).fingerprint != plain, name
    assert make_plan(HYBRID, **base, max_tokens=4096).fingerprint != plain
    with pytest.raises(TypeError, match="block_size"):
        make_plan(HYBRID, "1GiB", block_size=16)  # type: ignore[call-arg]


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64, 128, 1024])
def test_powers_of_two_are_block_sizes(n: int) -> None:
    assert make_plan(uniform(), "1GiB", tokens_per_block=n).tokens_per_block == n


@pytest.mark.parametrize("n", [-32, 0, 1, 3, 48, 2**21, 2**63, 32.5, "32", True])
def test_other_block_sizes_are_refused(n: Any) -> None:
    with pytest.raises(PlanError, match="tokens_per_block"):
        make_plan(uniform(), "1GiB", tokens_per_block=n)
