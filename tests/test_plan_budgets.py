"""Budgets, shares, counts, tiers, stages, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import PlanError
from kvpool.kinds import KVKind, LayerSpec, SharedKind
from kvpool.plan import budget, make_plan
from kvpool.plan.budget import format_bytes, free_bytes, parse_bytes
from kvpool.spec import CacheSpec
from model_data import HYBRID, uniform

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * GIB), ("500MB", 500_000_000), ("1.5 GiB", 3 * GIB // 2), ("1e9", 10**9), ("80 gb", 80 * 10**9),
     ("123", 123), (7, 7), ("0.1TB", 10**11), ("2tib", 2**41)],
)  # fmt: skip
def test_sizes_are_read_exactly(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("budget", [-1, "-4GiB", 0, "0", "x", "4 XiB", "", "GiB", 2**70, "1e30", 1.5, None, True, [1]])
def test_a_bad_budget_is_refused(budget: Any) -> None:
    if budget is None:
        assert make_plan(uniform(), budget).bound_by == "memory_fraction"
        return
    with pytest.raises(PlanError, match="budget"):
        make_plan(uniform(), budget)


def test_more_blocks_than_a_table_can_name_are_refused_or_noted() -> None:
    tiny = uniform(KVKind(1, 16), 1)
    with pytest.raises(PlanError, match="block ids go up to 2147483646"):
        make_plan(tiny, max_tokens=2**40, tokens_per_block=2)
    plan = make_plan(tiny, 2**62, tokens_per_block=2)
    assert plan.groups[0].num_blocks == 2**31 - 1
    assert any("the last id of a table" in note for note in plan.notes)


def test_bytes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (132, 1024, 2**20 - 1, 5 * 2**30)] == ["132 B", "1.00 KiB", "1.00 MiB", "5.00 GiB"]


def test_a_fraction_is_of_the_memory_free_now() -> None:
    plan = make_plan(uniform(), memory_fraction=0.25)
    assert plan.bound_by == "memory_fraction"
    assert 0.15 < plan.budget_bytes / free_bytes() < 0.35
    both = make_plan(uniform(), 2**20, memory_fraction=0.25)
    assert (both.bound_by, both.budget_bytes) == ("budget", 2**20)
    for fraction in (0, -0.5, 1.5, float("nan"), "half"):
        with pytest.raises(PlanError, match="memory_fraction"):
            make_plan(uniform(), memory_fraction=fraction)  # type: ignore[arg-type]


def test_what_a_cgroup_leaves_is_its_limit_less_what_cannot_be_given_back(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert budget._cgroup_v2(tmp_path) == 1000 - 700 + 150
    (tmp_path / "memory.max").write_text("max\n")
    assert budget._cgroup_v2(tmp_path) is None
    (tmp_path / "memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "memory.usage_in_bytes").write_text("1900\n")
    assert budget._cgroup_v1(tmp_path) == 100


def test_the_least_of_system_and_cgroup_is_free_and_never_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for system, new, old, want in ((100, 40, None, 40), (100, None, 70, 70), (100, None, None, 100), (100, -5, 7, 0)):
        monkeypatch.setattr(budget, "_meminfo_available", lambda system=system: system)
        monkeypatch.setattr(budget, "_cgroup_v2", lambda new=new: new)
        monkeypatch.setattr(budget, "_cgroup_v1", lambda old=old: old)
        assert free_bytes() == want


def test_a_budget_below_one_block_of_every_group_says_what_would_do() -> None:
    with pytest.raises(PlanError, match="give at least") as caught:
        make_plan(HYBRID, 20_000)
    least = int(str(caught.value).split("give at least ")[1].split()[0])
    assert make_plan(HYBRID, least).used_bytes <= least
    with pytest.raises(PlanError, match="give at least"):
        make_plan(HYBRID, least - 1)


def test_blocks_may_be_given_by_number_and_by_group() -> None:
    plan = make_plan(HYBRID, num_blocks=9)
    assert [group.num_blocks for group in plan.groups] == [9, 9, 9]
    assert (plan.bound_by, plan.left_over_bytes) == ("num_blocks", 0)
    plan = make_plan(HYBRID, num_blocks={"full": 5, "window": 6, "state": 7})
    assert [group.num_blocks for group in plan.groups] == [5, 6, 7]
    for wrong, match in (
        ({"full": 5}, "says nothing for"),
        ({"fool": 5}, "fool"),
        (0, "num_blocks"),
        (-3, "num_blocks"),
    ):
        with pytest.raises(PlanError, match=match):
            make_plan(HYBRID, num_blocks=wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="above the budget"):
        make_plan(HYBRID, 2**20, num_blocks=10_000)
    with pytest.raises(PlanError, match="not both"):
        make_plan(HYBRID, num_blocks=5, max_tokens=100)


def test_shares_divide_the_budget_and_must_be_complete() -> None:
    plan = make_plan(HYBRID, "1GiB", shares={"full": 0.5, "window-128": 0.25, "state": 0.25})
    parts = [g.committed_bytes(g.num_blocks, plan.granule_bytes) / plan.budget_bytes for g in plan.groups]
    assert parts == pytest.approx([0.5, 0.25, 0.25], abs=0.001)
    for wrong in (
        {"full": 1.0},
        {"full": 0.5, "window": 0.4, "state": 0.2},
        {"full": 1.5, "window": -0.6, "state": 0.1},
        {"full": 0.5, "window": 0.25, "states": 0.25},
    ):
        with pytest.raises(PlanError, match="shares"):
            make_plan(HYBRID, "1GiB", shares=wrong)


def test_shares_follow_what_a_typical_sequence_needs() -> None:
    plan = make_plan(HYBRID, "256MiB", typical_seq_len=4096, max_step_tokens=32, checkpoint_interval=4096)
    full, window, state = plan.groups
    sequences = full.num_blocks // (4096 // 32)
    assert window.num_blocks == pytest.approx(sequences * 5, rel=0.02)  # ceil(127 / 32) + 1
    assert state.num_blocks == pytest.approx(sequences * 2 + 64, rel=0.02)  # live and one checkpoint; 64 in a step


def test_addresses_are_reserved_for_the_largest_budget() -> None:
    plan = make_plan(HYBRID, "64MiB", max_budget="1GiB")
    for group in plan.groups:
        assert group.num_blocks < group.num_blocks_reserved
        assert group.committed_bytes(group.num_blocks_reserved, plan.granule_bytes) <= GIB
        assert group.committed_bytes(group.num_blocks_reserved + 1, plan.granule_bytes) > GIB
    with pytest.raises(PlanError, match="max_budget"):
        make_plan(HYBRID, "1GiB", max_budget="64MiB")


def test_host_and_disk_hold_whole_blocks_of_their_own_budget() -> None:
    plan = make_plan(HYBRID, "64MiB", host_budget="16MiB", disk_budget="1GiB")
    for tier in plan.tiers:
        used = sum(g.bytes_per_block * n for g, n in zip(plan.groups, tier.num_blocks, strict=True))
        assert 0.95 * tier.budget_bytes < used <= tier.budget_bytes


def test_a_pipeline_stage_holds_its_layers_and_what_they_share() -> None:
    spec = CacheSpec((LayerSpec((KVKind(2, 64),)), LayerSpec((SharedKind(0),)), LayerSpec((KVKind(2, 64),))))
    plan = make_plan(spec, "1MiB", layers=range(2, 3))
    assert plan.groups[0].layers == (2,)
    with pytest.raises(PlanError, match="layer 1 reads the cache of layer 0"):
        make_plan(spec, "1MiB", layers=range(1, 3))
    with pytest.raises(PlanError, match="layers must be a range"):
        make_plan(spec, "1MiB", layers=range(9))
    with pytest.raises(PlanError, match="stores no 'k'"):
        plan.find(0, "k")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"codec": "fp9"}, "unknown codec 'fp9'"),
        ({"codec": {"*": "bf16", "q": "fp8"}}, "key 'q'"),
        ({"codec": {"k": 7}}, "must be the name of a codec"),
        ({"codec": {"layers": {9: "fp8"}}}, "layer 9"),
        ({"codec": {"layers": ["fp8"]}}, "must map layer numbers"),
        ({"codec": 3}, "codec must be a name or a mapping"),
        ({"layout": "DNH"}, "unknown layout"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"max_seq_len": 100, "typical_seq_len": 200}, "typical_seq_len 200 is longer"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"num_draft": -1}, "num_draft"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank 2 must be below"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"host_budget": -1}, "host_budget"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"checkpoint_interval": 0}, "checkpoint_interval"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make_plan(HYBRID, "1GiB", **arguments)
