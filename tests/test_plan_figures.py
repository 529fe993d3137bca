"""Plans give the published figures."""

from __future__ import annotations

import pytest

from kvpool.kinds import KVKind, LatentKind
from kvpool.plan import make_plan
from kvpool.spec import CacheSpec
from model_data import model, uniform


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
