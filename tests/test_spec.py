"""CacheSpec.from_config: every family, from the JSON alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import SpecError, UnsupportedError
from kvpool.families.rules import RULES
from kvpool.families.weights import count_parameters
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, SharedKind, StateKind
from kvpool.plan import make_plan
from kvpool.spec import CacheSpec
from model_data import config, configs, expected

BASE: dict[str, Any] = {
    "model_type": "any",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
KV = KVKind(2, 32)


def spec(**fields: Any) -> CacheSpec:
    return CacheSpec.from_config({**BASE, **fields})


def windows(found: CacheSpec) -> list[int | None]:
    return [layer.lifetime.window for layer in found.layers]


# --- every row of the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", expected(), ids=lambda row: row["name"])
def test_bytes_of_a_token_and_a_state_are_those_of_the_table_or_the_model_is_refused(row: dict[str, str]) -> None:
    if not row["full_B"]:
        with pytest.raises((SpecError, UnsupportedError)):
            CacheSpec.from_config(config(row["name"]))
        return
    report = make_plan(CacheSpec.from_config(config(row["name"])), "64GiB", codec="bf16").to_dict()
    per_token = report["bytes_per_token"]
    assert (per_token["full"], per_token["window"], per_token["index"], report["state_bytes_per_sequence"]) == (
        int(row["full_B"]),
        int(row["swa_B"]),
        int(row["index_B"]),
        int(row["state_B"]),
    )


#: Models whose configuration leaves to the model's code what the cache looks like; all others say it themselves.
NEED_RULES = {
    "deepseek-ai__DeepSeek-V4-Flash", "deepseek-ai__DeepSeek-V4-Pro",  # refused by rule
    "nvidia__DeepSeek-V4-Flash-NVFP4", "nvidia__DeepSeek-V4-Pro-NVFP4",
    "mlc__snowflake-arctic-embed-m",
    "meta-llama__Llama-4-Maverick-17B-128E-Instruct", "meta-llama__Llama-4-Scout-17B-16E-Instruct",
    "mlc__gemma2_2b", "mlc__gemma2_2b-jpn", "mlc__gemma2_9b",  # every second layer
    "mlc__llava", "mlc__rwkv5_3b",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in configs() if name not in NEED_RULES])
def test_renaming_the_model_type_changes_nothing(name: str) -> None:
    def read(found: dict[str, Any]) -> Any:
        try:
            return CacheSpec.from_config(found).layers
        except (SpecError, UnsupportedError) as error:
            return type(error)

    renamed = config(name)
    for part in [renamed, *(v for v in renamed.values() if isinstance(v, dict))]:
        if "model_type" in part:
            part["model_type"] = "renamed"
    assert read(renamed) == read(config(name))


def test_a_rule_needs_no_rule_once_its_fields_are_written_down() -> None:
    gemma = config("mlc__gemma2_9b")
    layers = CacheSpec.from_config(gemma).layers
    types = ["sliding_attention", "full_attention"] * 21
    assert CacheSpec.from_config({**gemma, "layer_types": types, "model_type": "renamed"}).layers == layers
    llama = config("meta-llama__Llama-4-Scout-17B-16E-Instruct")["text_config"]
    layers = CacheSpec.from_config(llama).layers
    rotated = [1, 1, 1, 0] * 12
    assert CacheSpec.from_config({**llama, "no_rope_layers": rotated, "model_type": "renamed"}).layers == layers


def test_every_rule_names_the_file_it_was_read_from() -> None:
    for name, rule in RULES.items():
        assert rule.source.endswith(".py"), name
        assert "/" in rule.source, name


# --- heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, 2),
        ({"num_key_value_heads": None}, 8),
        ({"num_key_value_heads": None, "num_kv_heads": 4}, 4),
        ({"num_key_value_heads": None, "n_head_kv": 4}, 4),
        ({"num_key_value_heads": None, "n_head_kv": None}, 8),
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "multi_query": True, "num_kv_heads": 8}, 1),
        ({"num_key_value_heads": None, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, 4),
        ({"num_key_value_heads": None, "multi_query": False}, 8),
        ({"num_key_value_heads": None, "multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"num_key_value_heads": None, "multi_query_attention": False, "multi_query_group_num": 2}, 8),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 4}}, 4),
        ({"num_key_value_heads": None, "attn_config": {"attn_type": "multiquery_attention"}}, 1),
        ({"num_key_value_heads": None, "num_attention_groups": 4}, 4),
        ({"num_key_value_heads": None, "num_key_value_heads_per_layer": [4, 2, 2, 2]}, 4),
        ({"kv_lora_rank": 0}, 2),
        ({"v_head_dim": 0}, 2),
    ],
)
def test_kv_heads_are_found_under_all_their_names(fields: dict[str, Any], heads: int) -> None:
    assert spec(**fields).layers[0].kinds == (KVKind(heads, 32),)


def test_a_missing_head_dim_is_hidden_size_by_heads_and_noted() -> None:
    found = spec(head_dim=None)
    assert found.layers[0].kinds == (KVKind(2, 32),)
    assert any("head_dim is not in the config" in note for note in found.notes)


def test_a_hidden_size_that_heads_do_not_divide_asks_for_head_dim() -> None:
    with pytest.raises(SpecError, match="no multiple of 8 heads; add head_dim"):
        spec(head_dim=None, hidden_size=260)


def test_k_and_v_may_differ_in_size_and_sliding_layers_in_heads() -> None:
    found = spec(
        v_head_dim=16, sliding_window=64, hybrid_layer_pattern=[0, 1, 1, 0],
        swa_num_key_value_heads=4, swa_head_dim=48, swa_v_head_dim=24,
    )  # fmt: skip
    assert found.layers[0] == LayerSpec((KVKind(2, 32, 16),))
    assert found.layers[1] == LayerSpec((KVKind(4, 48, 24),), Lifetime(window=64))


def test_global_layers_may_have_heads_and_sizes_of_their_own() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    fields = {"layer_types": types, "sliding_window": 64, "global_head_dim": 128, "num_global_key_value_heads": 1}
    found = spec(**fields, attention_k_eq_v=True)
    assert [layer.kinds[0] for layer in found.layers[:2]] == [KV, KVKind(1, 128)]
    assert spec(**fields, attention_k_eq_v=False).layers[1].kinds == (KVKind(2, 128),)


def test_per_layer_config_and_lists_apply_to_their_layer() -> None:
    found = spec(per_layer_config={"01": {"head_dim": 64}, "3": {"num_key_value_heads": 8}})
    assert [layer.kinds[0] for layer in found.layers] == [KV, KVKind(2, 64), KV, KVKind(8, 32)]
    found = spec(num_key_value_heads=[1, 2, 4, 8], num_attention_heads=[8, 8, 8, 16])
    assert found.num_q_heads == 8
    assert [layer.kinds[0].num_kv_heads for layer in found.layers] == [1, 2, 4, 8]  # type: ignore[union-attr]


# --- windows and chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, [64, None, 64, None]),
        ({"sliding_window_pattern": 2}, [64, None, 64, None]),
        ({"sliding_window_pattern": 4}, [64, 64, 64, None]),
        ({"sliding_window_pattern": "LLG"}, [64, 64, None, 64]),
        ({"global_attn_every_n_layers": 2}, [64, None, 64, None]),
        ({"use_sliding_window": False}, [None] * 4),
        ({"use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 64]),
        ({"use_sliding_window": True}, [64] * 4),
        ({}, [64] * 4),
        ({"hybrid_layer_pattern": [0, 1, 1, 0]}, [None, 64, 64, None]),
        ({"attention_types": [[["global", "local"], 2]]}, [None, 64, None, 64]),
        ({"sliding_window": [64, None, 0, 32]}, [64, None, None, 32]),
        ({"sliding_window": -1}, [None] * 4),
        ({"layer_switch": 4}, [64, 64, 64, None]),
        ({"model_type": "gemma2"}, [64, None, 64, None]),
        ({"model_type": "gemma3_text"}, [64, 64, 64, 64]),
        ({"model_type": "cohere2"}, [64, 64, 64, None]),
        ({"model_type": "gpt_oss"}, [64, None, 64, None]),
        ({"model_type": "gemma4_text", "global_head_dim": 32}, [64, 64, 64, None]),
        ({"model_type": "cwm"}, [None, 64, 64, 64]),
    ],
)
def test_windows_follow_lists_patterns_flags_and_the_rules_of_the_code(
    fields: dict[str, Any], want: list[int | None]
) -> None:
    assert windows(spec(**{"sliding_window": 64, **fields})) == want


def test_a_null_window_is_no_window_even_where_the_code_has_a_default() -> None:
    assert windows(spec(model_type="mistral", sliding_window=None)) == [None] * 4
    found = spec(model_type="mistral")
    assert windows(found) == [4096] * 4
    assert any("sliding_window is not in the config: 4096" in note for note in found.notes)


def test_chunks_are_on_the_layers_that_rotate() -> None:
    found = spec(attention_chunk_size=1024, no_rope_layers=[1, 1, 1, 0])
    assert [layer.lifetime.chunk for layer in found.layers] == [1024, 1024, 1024, None]
    by_rule = spec(model_type="llama4_text", attention_chunk_size=1024, no_rope_layers=[])
    assert by_rule.layers == found.layers


def test_sink_tokens_go_with_a_window() -> None:
    assert spec(sliding_window=64, attention_sink_size=4).layers[0].lifetime == Lifetime(window=64, sink_tokens=4)


# --- latents and indexers -----------------------------------------------------------------------------------

MLA: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_a_latent_ignores_head_dim_and_says_so() -> None:
    found = spec(**MLA, v_head_dim=128)
    assert found.layers[0].kinds == (LatentKind(512, 64),)
    assert any("head_dim is ignored" in note for note in found.notes)
    assert spec(**MLA, use_mla=False).layers[0].kinds == (KV,)


@pytest.mark.parametrize(
    ("fields", "indexed"),
    [
        ({}, [True] * 4),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, [True, False, True, False]),
        ({"index_topk_pattern": "FSSF"}, [True, False, False, True]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, [True, True, False, True]),
        ({"use_dsa": False}, [False] * 4),
    ],
)
def test_indexers_are_on_the_layers_the_config_names(fields: dict[str, Any], indexed: list[bool]) -> None:
    found = spec(**MLA, index_head_dim=128, index_topk=2048, **fields)
    assert [IndexerKind(128) in layer.kinds for layer in found.layers] == indexed


def test_an_attention_block_that_attends_twice_has_two_caches() -> None:
    assert spec(**MLA, model_type="longcat_flash").num_layers == 8


# --- recurrences --------------------------------------------------------------------------------------------


def states(found: CacheSpec, layer: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {k.name: (k.shape, k.dtype) for k in found.layers[layer].kinds if isinstance(k, StateKind)}


def test_mamba_1_keeps_kernel_minus_one_columns_and_a_vector_a_channel() -> None:
    found = spec(attn_layer_period=4, attn_layer_offset=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
    assert states(found, 0) == {"conv": ((512, 3), "bf16"), "ssm": ((512, 16), "bf16")}
    assert found.layers[2].kinds == (KV,)


def test_mamba_2_convolves_x_b_and_c() -> None:
    found = spec(
        hybrid_override_pattern="M*-E", mamba_num_heads=8, mamba_head_dim=64, n_groups=2, ssm_state_size=16,
        conv_kernel=4, mamba_ssm_cache_dtype="float32",
    )  # fmt: skip
    assert states(found, 0) == {"conv": ((512 + 2 * 2 * 16, 3), "bf16"), "ssm": ((8, 64, 16), "fp32")}
    assert [len(layer.kinds) for layer in found.layers] == [2, 1, 0, 0]


def test_a_gated_delta_net_keeps_a_matrix_a_value_head() -> None:
    found = spec(
        full_attention_interval=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, mamba_ssm_dtype="float32",
    )  # fmt: skip
    assert states(found, 0) == {"conv": ((2 * 2 * 16 + 4 * 32, 3), "bf16"), "ssm": ((4, 16, 32), "fp32")}
    assert found.layers[3].kinds == (KV,)


def test_kda_counts_its_layers_from_one_and_stands_beside_latents() -> None:
    linear = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 16,
              "short_conv_kernel_size": 4}  # fmt: skip
    found = spec(**MLA, linear_attn_config=linear)
    assert states(found, 0) == {"conv": ((96, 3), "bf16"), "ssm": ((2, 16, 16), "fp32")}
    assert found.layers[3].kinds == (LatentKind(512, 64),)
    with pytest.raises(SpecError, match="every layer must be in one of"):
        spec(**MLA, linear_attn_config={**linear, "kda_layers": [1, 2]})


def test_lightning_layers_keep_a_square_a_head_and_need_kv_heads_said() -> None:
    found = spec(attn_type_list=[0, 0, 0, 1])
    assert states(found, 0) == {"ssm": ((8, 32, 32), "fp32")}
    with pytest.raises(SpecError, match="num_key_value_heads"):
        spec(attn_type_list=[0, 0, 0, 1], num_key_value_heads=None)


def test_attention_of_a_zamba_layer_is_twice_as_wide_whatever_kv_channels_says() -> None:
    found = spec(
        model_type="zamba2", head_dim=None, kv_channels=32, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1, n_mamba_heads=8,
    )  # fmt: skip
    assert found.layers[1].kinds[0] == KVKind(2, 64)
    assert states(found, 0) == {"conv": ((512 + 32, 3), "bf16"), "ssm": ((8, 64, 16), "bf16")}


def test_short_convolutions_and_recurrent_units_are_states_too() -> None:
    found = spec(layer_types=["conv", "full_attention"] * 2, conv_L_cache=3)
    assert states(found, 0) == {"conv": ((256, 2), "bf16")}
    found = spec(block_types=["recurrent", "recurrent", "attention"], lru_width=320, conv1d_width=4,
                 attention_window_size=64)  # fmt: skip
    assert states(found, 0) == {"conv": ((320, 3), "bf16"), "ssm": ((320,), "fp32")}
    assert windows(found) == [None, None, 64, None]


def test_a_layer_may_attend_and_recur() -> None:
    found = spec(model_type="falcon_h1", mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1,
                 mamba_d_state=16, mamba_d_conv=4)  # fmt: skip
    assert found.layers[0].kinds[0] == KV
    assert set(states(found, 0)) == {"conv", "ssm"}
    renamed = spec(mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=16,
                   mamba_d_conv=4)  # fmt: skip
    assert renamed.layers == found.layers


def test_a_hybrid_that_does_not_say_which_layers_attend_is_refused() -> None:
    with pytest.raises(SpecError, match="does not say which are which"):
        spec(mamba_d_state=16, mamba_d_conv=4)


def test_a_recurrence_of_unknown_fields_is_refused() -> None:
    with pytest.raises(SpecError, match="no known recurrence"):
        spec(layer_types=["linear_attention", "full_attention"] * 2)


# --- sharing and looping ------------------------------------------------------------------------------------


def test_the_last_layers_share_with_the_last_of_their_type() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    found = spec(layer_types=types, sliding_window=64, num_kv_shared_layers=2)
    assert [layer.kinds for layer in found.layers] == [(KV,), (KV,), (SharedKind(0),), (SharedKind(1),)]
    assert windows(found) == [64, None, 64, None]


def test_layers_may_name_their_source_or_share_in_runs() -> None:
    assert spec(kv_source_layers=[0, 0, 2, 2]).layers[1].kinds == (SharedKind(0),)
    assert spec(use_cla=True, cla_share_factor=2).layers[3].kinds == (SharedKind(2),)


def test_looped_layers_have_a_cache_for_each_pass() -> None:
    found = spec(loop_num_passes=3, loop_layer_index_start=1, loop_layer_index_end=3)
    assert found.num_layers == 4 + 2 * 2


# --- what is refused, and what is read ----------------------------------------------------------------------


def test_models_without_a_cache_are_refused_with_the_reason() -> None:
    with pytest.raises(SpecError, match="encoder"):
        spec(model_type="bert")
    with pytest.raises(SpecError, match="type_vocab_size marks an encoder"):
        spec(type_vocab_size=2, architectures=["SomeModel"])
    assert spec(type_vocab_size=2, is_decoder=True).num_layers == 4
    with pytest.raises(UnsupportedError, match="cross attention"):
        spec(is_encoder_decoder=True)
    with pytest.raises(UnsupportedError, match="cross attention"):
        spec(cross_attention_layers=[1, 3])
    with pytest.raises(SpecError, match="stores anything"):
        spec(layer_types=["moe"] * 4)


def test_unknown_layer_types_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="'quantum_attention'"):
        spec(layer_types=["quantum_attention"] * 4)
    with pytest.raises(UnsupportedError, match="cross attention"):
        spec(layer_types=["cross_attention"] * 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -4},
        {"num_hidden_layers": "four"},
        {"num_hidden_layers": None},
        {"num_hidden_layers": True},
        {"num_attention_heads": 10**30},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 16},
        {"head_dim": 2.5},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full_attention!"},
        {"layer_types": {"a": 1}},
        {"layer_types": [1, 2, 3, 4]},
        {"sliding_window": -1, "layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["sliding_attention"] * 4},
        {"torch_dtype": "float7"},
        {"max_position_embeddings": 0},
        {"kv_lora_rank": -5},
        {"attn_type_list": [0, 1, 2, 3]},
        {"block_configs": [{}] * 4},
        {"num_kv_shared_layers": 4},
        {"text_config": {"text_config": {"text_config": {"text_config": {}}}}},
    ],
)
def test_absurd_fields_are_refused_with_a_message(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**fields)
    assert len(str(caught.value)) > 20


def test_a_config_comes_as_a_path_a_directory_a_dict_or_an_object(tmp_path: Path) -> None:
    want = spec()
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))

    class Holder:
        def to_dict(self) -> dict[str, Any]:
            return dict(BASE)

    assert CacheSpec.from_config(BASE) == want
    assert CacheSpec.from_config(Holder()) == want
    for found in (CacheSpec.from_config(tmp_path), CacheSpec.from_config(str(tmp_path / "config.json"))):
        assert found.layers == want.layers
        assert found.kv_codec_hint == "fp8-tensor"
        assert any("FP8" in note for note in found.notes)
    with pytest.raises(SpecError, match="to_dict"):
        CacheSpec.from_config(7)


@pytest.mark.parametrize("text", ["", "{", '{"num_hidden_layers": 4,', "[]", "3", "null", "[" * 100_000, "\x00"])
def test_truncated_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=str(path)):
        CacheSpec.from_config(path)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        CacheSpec.from_config(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not valid JSON"):
        CacheSpec.from_config(tmp_path)


def test_every_inference_is_noted() -> None:
    found = CacheSpec.from_config({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4})
    assert found.layers == (LayerSpec((KVKind(4, 16),), FULL),) * 2
    for what in ("num_key_value_heads", "head_dim", "dtype", "n_positions"):
        assert any(what in note for note in found.notes), (what, found.notes)


def test_layers_for_multi_token_prediction_are_noted_and_not_counted() -> None:
    found = spec(num_nextn_predict_layers=1)
    assert found.num_layers == 4
    assert any("multi-token prediction" in note for note in found.notes)


def test_reading_a_config_loads_neither_torch_nor_transformers() -> None:
    code = (
        f"import sys; from kvpool.spec import CacheSpec; CacheSpec.from_config({BASE!r});"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama__Meta-Llama-3.1-8B", 8.03),
        ("meta-llama__Meta-Llama-3.1-405B", 405.85),
        ("mistralai__Mixtral-8x7B-v0.1", 46.7),
        ("deepseek-ai__DeepSeek-V3", 671.0),
        ("Qwen__Qwen3-235B-A22B-FP8", 235.1),
        ("mlc__gemma2_9b", 9.24),
        ("openai__gpt-oss-120b", 116.8),
        ("meta-llama__Llama-4-Maverick-17B-128E-Instruct", 400.7),
        ("mlc__gpt2", 0.124),
        ("nvidia__Llama-3_3-Nemotron-Super-49B-v1", 49.9),
    ],
)
def test_parameters_are_estimated_within_two_per_cent_of_what_is_published(name: str, billions: float) -> None:
    assert count_parameters(config(name)).total / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_step_reads_the_experts_its_batch_chooses() -> None:
    mixtral = count_parameters(config("mistralai__Mixtral-8x7B-v0.1"))
    one, many = mixtral.step_bytes("bf16", 1), mixtral.step_bytes("bf16", 256)
    assert one < mixtral.active * 2
    assert many == pytest.approx((mixtral.total - mixtral.embedding // 2) * 2, rel=0.001)
