"""Plans: published figures, budgets, sizes, places and what they serialise to."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from kvpool.codecs import CODECS
from kvpool.errors import PlanError
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, SharedKind, StateKind
from kvpool.layout import LAYOUTS
from kvpool.plan import Plan, make_plan
from kvpool.plan.budget import format_bytes, free_bytes, parse_bytes
from kvpool.spec import CacheSpec
from model_data import config

GIB = 2**30


def model(name: str) -> CacheSpec:
    return CacheSpec.from_config(config(name))


def uniform(kv: KVKind | LatentKind = KVKind(2, 64), layers: int = 2, **fields: Any) -> CacheSpec:  # noqa: B008
    return CacheSpec((LayerSpec((kv,)),) * layers, **{"max_seq_len": 4096, **fields})


HYBRID = CacheSpec(
    (
        LayerSpec((KVKind(2, 64),)),
        LayerSpec((KVKind(2, 64),), Lifetime(window=128)),
        LayerSpec((StateKind("conv", (96, 3), "bf16", ((96, 1),)), StateKind("ssm", (4, 16, 32), "fp32", ((4, 1),)))),
    ),
    max_seq_len=4096,
)


# --- published figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("deepseek-ai__DeepSeek-V3", 70_272),
        ("meta-llama__Meta-Llama-3.1-405B", 516_096),
        ("mlc__llama3_1_70b", 327_680),  # Qwen2.5-72B has the same 80 layers of 8 heads of 128
    ],
)
def test_bytes_per_token_are_the_published_ones(name: str, figure: int) -> None:
    assert make_plan(model(name), "64GiB", codec="bf16").to_dict()["bytes_per_token"]["full"] == figure


def test_qwen2_5_72b_takes_327_680_bytes_a_token() -> None:
    fields = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    spec = CacheSpec.from_config({"model_type": "qwen2", "torch_dtype": "bfloat16", "max_position_embeddings": 32768,
                                  "use_sliding_window": False, "sliding_window": 131072, **fields})  # fmt: skip
    assert make_plan(spec, "64GiB").to_dict()["bytes_per_token"] == {"full": 327_680, "window": 0, "index": 0}


def test_llama_3_8b_has_blocks_of_256_kib_a_layer_and_8_mib() -> None:
    (group,) = make_plan(model("mlc__llama3_1_8b"), "4GiB", tokens_per_block=64).groups
    assert group.bytes_per_block == 8 * 2**20
    assert group.pools[0].planes[0].strides[1] == 256 * 2**10
    (group,) = make_plan(uniform(KVKind(32, 128), 32), "4GiB", tokens_per_block=64).groups
    assert group.bytes_per_block == 32 * 2**20


@pytest.mark.parametrize(
    ("kind", "elements"),
    [(KVKind(128, 128), 32_768), (KVKind(8, 128), 2_048), (KVKind(1, 128), 256), (LatentKind(512, 64), 576)],
)
def test_elements_a_token_and_layer(kind: KVKind | LatentKind, elements: int) -> None:
    (group,) = make_plan(uniform(kind, 1), "1GiB", tokens_per_block=2).groups
    assert group.payload_bytes_per_block == 2 * elements * 2


def test_a_budget_of_69_524_783_104_bytes_holds_132_608_tokens_of_llama_2_7b() -> None:
    plan = make_plan(model("mlc__llama2_7b"), 69_524_783_104, tokens_per_block=64, max_seq_len=4096)
    assert plan.groups[0].num_blocks == 2072
    assert plan.num_tokens == 132_608
    assert (plan.bound_by, plan.left_over_bytes) == ("budget", 0)


def test_qwen3_6_27b_holds_262_144_tokens_in_16_384_mib_and_four_states_in_598_5_mib() -> None:
    spec = model("nvidia__Qwen3.6-27B-NVFP4")
    plan = make_plan(spec, "64GiB", codec={"*": "fp16", "conv": "fp32", "ssm": "fp32"})
    report = plan.to_dict()
    assert report["bytes_per_token"]["full"] * 262_144 == 16_384 * 2**20
    assert report["state_bytes_per_sequence"] * 4 == 598.5 * 2**20
    (state,) = (group for group in plan.groups if group.is_state)
    assert len(state.layers) == 48


def test_deepseek_v3_takes_4_605_345_792_bytes_for_65_536_tokens() -> None:
    plan = make_plan(model("deepseek-ai__DeepSeek-V3"), max_tokens=65_536, typical_seq_len=8192)
    assert plan.used_bytes == 4_605_345_792


def test_indexer_keys_take_132_bytes_a_token_and_layer() -> None:
    plan = make_plan(model("deepseek-ai__DeepSeek-V3.2"), "4GiB")
    assert plan.to_dict()["bytes_per_token"]["index"] == 132 * 61
    _, pool, _, _ = plan.find(0, "index")
    data, scale = pool.planes
    assert scale.offset - data.offset == 128 * 32  # one record: 128 * N codes, then 4 * N scale bytes
    assert data.bytes_per_block + scale.bytes_per_block == 132 * 32 * 61


def test_nvfp4_takes_9_16ths_of_a_byte_and_has_two_planes_in_each_pool_of_two_groups() -> None:
    spec = model("openai__gpt-oss-20b")
    plan = make_plan(spec, "4GiB", codec="nvfp4")
    assert [group.name for group in plan.groups] == ["full", "window-128"]
    for group in plan.groups:
        (pool,) = group.pools
        assert [plane.name for plane in pool.planes] == ["data", "block_scale"]
        elements = 2 * len(pool.layers) * 8 * 64 * 32
        assert sum(plane.bytes_per_block for plane in pool.planes) == 0.5625 * elements


# --- sizing cases from public reports -----------------------------------------------------------------------


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


# --- budgets ------------------------------------------------------------------------------------------------


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


# --- codecs by part and layer -------------------------------------------------------------------------------


def codec_of(plan: Plan, layer: int, part: str) -> str:
    return plan.find(layer, part)[1].codec


def test_a_plain_name_covers_k_v_and_latents_and_leaves_indexers_and_states() -> None:
    spec = CacheSpec((LayerSpec((LatentKind(512, 64), IndexerKind(128))), *HYBRID.layers), max_seq_len=4096)
    plan = make_plan(spec, "1GiB", codec="fp8")
    found = [codec_of(plan, *x) for x in ((0, "latent"), (0, "index"), (1, "k"), (3, "conv"), (3, "ssm"))]
    assert found == ["fp8", "index-fp8", "fp8", "bf16", "fp32"]


def test_parts_and_layers_may_have_codecs_of_their_own() -> None:
    plan = make_plan(
        uniform(layers=4), "1GiB", codec={"k": "fp8", "v": "nvfp4", "layers": {0: "bf16", -1: {"v": "int8"}}}
    )
    assert [codec_of(plan, i, "k") for i in range(4)] == ["bf16", "fp8", "fp8", "fp8"]
    assert [codec_of(plan, i, "v") for i in range(4)] == ["bf16", "nvfp4", "nvfp4", "int8"]
    (group,) = plan.groups
    assert group.layers == (0, 1, 2, 3)


def test_a_latent_splits_into_two_pools_when_its_rope_part_has_another_codec() -> None:
    spec = uniform(LatentKind(512, 64))
    whole = make_plan(spec, "1GiB", codec={"latent": "fp8"})
    assert [pool.parts for pool in whole.groups[0].pools] == [("latent",)]
    assert whole.groups[0].pools[0].vector.segments == (128, 128, 128, 128, 64)
    split = make_plan(spec, "1GiB", codec={"latent": "fp8", "rope": "bf16"})
    assert [(pool.parts, pool.vector.dim) for pool in split.groups[0].pools] == [(("latent",), 512), (("rope",), 64)]


def test_naming_a_part_the_model_lacks_is_noted() -> None:
    plan = make_plan(uniform(), "1GiB", codec={"*": "fp8", "ssm": "bf16"})
    assert any("stores no ssm" in note for note in plan.notes)


def test_layer_first_groups_with_several_sets_of_layers_have_a_range_for_each() -> None:
    mixed = CacheSpec((*HYBRID.layers, LayerSpec((StateKind("ssm", (2, 8), "fp32"),))), max_seq_len=4096)
    plan = make_plan(mixed, "64MiB")
    state = plan.groups[-1]
    assert state.layer_first
    assert len(state.ranges) == 2
    pieces = state.pieces(3)
    assert len(pieces) == 2
    assert sum(size for _, size in pieces) == state.bytes_per_block
    assert state.committed_bytes(5, 4096) == sum(-(-r.row_bytes * 5 // 4096) * 4096 * r.num_rows for r in state.ranges)


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "nvfp4", "nvfp4-token", "int8"])
def test_an_address_is_the_sum_of_its_named_products(codec: str, layout: str) -> None:
    plan = make_plan(uniform(KVKind(3, 32), 4), "8MiB", codec=codec, layout=layout, tokens_per_block=16)
    found = plan.address(block=7, layer=3, part="v", head=2, token=5, dim=19)
    group, pool, layer, factor = plan.find(3, "v")
    data = pool.plane("data")
    codes = 2 if "nvfp4" in codec else 1
    assert (group, layer, factor) == (0, 3, 1)
    assert [term.axis for term in found.data.terms] == list(data.order)
    index = dict(zip("BLFHNC", (7, 3, 1, 2, 5, 19 // codes), strict=True))
    strides = dict(zip("BLFHNC", data.strides, strict=True))
    assert found.offset == data.offset + sum(index[axis] * strides[axis] for axis in "BLFHNC")
    assert found.data.nibble == (1 if codes == 2 else None)
    assert [plane.plane for plane in found.scales] == [plane.name for plane in pool.planes[1:]]
    for place, plane in zip(found.scales, pool.planes[1:], strict=True):
        container = {} if len(plane.shape) == 5 else {"C": 19 // 16}
        want = plane.offset + sum(
            {**index, **container}[axis] * stride for axis, stride in zip("BLFHNC", plane.strides, strict=False)
        )
        assert place.offset == want
    assert f"= {found.offset}" in str(found)


def test_a_latent_has_one_scale_for_128_channels_and_one_for_the_rope_part() -> None:
    plan = make_plan(uniform(LatentKind(512, 64)), "8MiB", codec="fp8")
    bases = [plan.address(0, 0, "latent", dim=dim).scales[0].offset for dim in (0, 127, 128, 511, 512, 575)]
    assert [b - bases[0] for b in bases] == [0, 0, 4, 12, 16, 16]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"block": 10**9}, "block must be between 0 and"),
        ({"block": -1}, "block"),
        ({"layer": 2}, "layer 2 does not exist"),
        ({"part": "latent"}, "stores no 'latent'; it stores k, v"),
        ({"head": 2}, "head must be between 0 and 1"),
        ({"token": 32}, "token must be between 0 and 31"),
        ({"dim": 64}, "dim must be between 0 and 63"),
    ],
)
def test_indices_out_of_range_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make_plan(uniform(), "1GiB").address(**{"block": 0, "layer": 0, "part": "k", **arguments})


def test_sizes_and_addresses_are_exact_above_two_to_the_31() -> None:
    plan = make_plan(uniform(KVKind(8, 128), 80), "512GiB", codec="bf16")
    (group,) = plan.groups
    last = plan.address(group.num_blocks - 1, 79, "v", 7, 31, 127)
    assert last.offset == group.num_blocks * group.bytes_per_block - 2
    assert last.offset > 2**38
    assert 80 * 32768 * 8 * 128 == 2_684_354_560
    assert (
        make_plan(uniform(KVKind(8, 128), 80), max_tokens=32768, max_seq_len=32768).used_bytes == 2 * 2 * 2_684_354_560
    )


# --- identity and JSON --------------------------------------------------------------------------------------


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
