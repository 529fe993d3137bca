"""What only a model's own code knows: the one table of model types.

A configuration that is complete needs none of this: its fields say the same under any name. A rule fills in fields that
its model's code assumes, gives the types of the layers where the config does not list them, or refuses a cache that
cannot be described. Every rule names the file it was read from (under `transformers/models/` of 5.24 unless a whole
path is given). The plain defaults of the configuration classes are data: `defaults.json`, written by
`tools/family_defaults.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.families.fields import Fields
from kvpool.families.layer_types import CONV, FULL, HYBRID, HYBRID_SLIDING, INDEXED, LINEAR, SLIDING, LayerType

Types = Callable[[Fields, int], list[LayerType]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one model's code assumes.

    Attributes:
        source: The file that says so.
        assumes: Fields the code takes for granted when they are absent.
        types: Types of the layers when the config lists none.
        prepare: Fields the code works out from others.
        last_full: The last layer is full whatever the list says.
        caches_per_layer: Caches of one layer of the config.
        refuse: Why there is no plan for this model.
    """

    source: str
    assumes: Mapping[str, Any] = field(default_factory=dict)
    types: Types | None = None
    prepare: Callable[[Fields], Mapping[str, Any]] | None = None
    last_full: bool = False
    caches_per_layer: int = 1
    refuse: str = ""


def each(choose: Callable[[int, int], LayerType]) -> Types:
    """Types by layer index and number of layers."""
    return lambda fields, n: [choose(i, n) for i in range(n)]


def sliding_unless(full: Callable[[int, int], bool]) -> Types:
    """Sliding layers, full where `full(index, number of layers)`; all full without a window."""
    return lambda fields, n: [SLIDING if fields.has("sliding_window") and not full(i, n) else FULL for i in range(n)]


def _smollm3(fields: Fields, n: int) -> list[LayerType]:
    rotated = fields.per_layer("no_rope_layers", n, lambda x: x in (0, 1), "0 or 1")
    period = fields.integer("no_rope_layer_interval") or 4
    rotated = rotated or [int((i + 1) % period != 0) for i in range(n)]
    window = fields.flag("use_sliding_window") and fields.has("sliding_window")
    return [SLIDING if window and not r else FULL for r in rotated]


def _cohere2_moe(fields: Fields, n: int) -> list[LayerType]:
    dense = min(fields.integer("first_k_dense_replace", least=0) or 0, n)
    head = fields.integer("prefix_dense_sliding_window_pattern") or 1
    rest = fields.integer("sliding_window_pattern") or 4
    return [SLIDING if (i + 1) % head else FULL for i in range(dense)] + [
        SLIDING if (i + 1) % rest else FULL for i in range(n - dense)
    ]


def _olmo_hybrid(fields: Fields) -> dict[str, Any]:
    keys = fields.integer("linear_num_key_heads") or fields.need("num_attention_heads")
    values = fields.integer("linear_num_value_heads") or fields.need("num_attention_heads")
    size = fields.integer("linear_key_head_dim") or int(0.75 * fields.need("hidden_size") / keys)
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": 2 * size,
    }


def _modernbert_decoder(fields: Fields) -> dict[str, Any]:
    local = None if "sliding_window" in fields.data else fields.integer("local_attention")
    return {"sliding_window": local // 2} if local else {}


def _mimo_v2(fields: Fields) -> dict[str, Any]:
    if "swa_num_key_value_heads" in fields.data or "per_layer_config" in fields.data:
        return {}
    return {"swa_num_key_value_heads": 2 * fields.need("num_key_value_heads")}


def _zamba2(fields: Fields) -> dict[str, Any]:
    if "attention_head_dim" in fields.data or "attention_head_dim" in fields.defaults:
        return {}
    return {"attention_head_dim": 2 * fields.need("hidden_size") // fields.need("num_attention_heads")}


def _dory(fields: Fields) -> dict[str, Any]:
    """Released configs list attention and MLP blocks one by one; a layer is a pair of them."""
    types = fields.data.get("layer_types")
    if not isinstance(types, list | tuple) or "mlp" not in types:
        return {}
    counts = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    halves = {name: value // 2 for name in counts if (value := fields.integer(name)) is not None}
    return {"layer_types": list(types[::2]), **halves}


def _lfm3(i: int, n: int) -> LayerType:
    return FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV


def _zamba(i: int, n: int) -> LayerType:
    return LINEAR if i < 2 else HYBRID if i == 2 or (i - 3) % 6 == 4 else LINEAR


_LARA = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
_LINEAR = each(lambda i, n: LINEAR)
_INDEXED = each(lambda i, n: INDEXED)
_EVERY_6TH_AND_LAST = sliding_unless(lambda i, n: (i + 1) % 6 == 0 or i == n - 1)
_EVERY_4TH_FROM_0 = sliding_unless(lambda i, n: i % 4 == 0)
_HYBRID_BUT_6TH = each(lambda i, n: HYBRID_SLIDING if (i + 1) % 6 else HYBRID)
_DOTS3 = each(lambda i, n: INDEXED if i < 2 or i % 4 == 1 else SLIDING)

_ENCODER = "it is an encoder: it reads a whole text at once and keeps no KV cache"
_RECURRENT = "it keeps a recurrent state of its own form, which is not described here yet"
_V4 = "its compressed caches (one entry for 4 or 128 tokens, beside a window) are not described here yet"
_QSA = "its block-compressed indexer keys and n-gram convolutions are not described here yet"
_CROSS = "its decoder attends to an encoder: cross attention is not supported"

RULES: dict[str, Rule] = {
    # Windows by rule of the code.
    "gemma2": Rule("gemma2/configuration_gemma2.py", {"sliding_window_pattern": 2}),
    "vaultgemma": Rule("vaultgemma/configuration_vaultgemma.py", {"sliding_window_pattern": 2}),
    "gpt_oss": Rule("gpt_oss/configuration_gpt_oss.py", {"sliding_window_pattern": 2}),
    "gemma3": Rule("gemma3/configuration_gemma3.py", {"sliding_window_pattern": 6}),
    "gemma3_text": Rule("gemma3/configuration_gemma3.py", {"sliding_window_pattern": 6}),
    "gemma3n_text": Rule("gemma3n/configuration_gemma3n.py", {"sliding_window_pattern": 5}),
    "gemma4_text": Rule(
        "gemma4/configuration_gemma4.py", {"sliding_window_pattern": 6, "global_head_dim": 512}, last_full=True
    ),
    "gemma4_unified_text": Rule(
        "gemma4_unified/configuration_gemma4_unified.py",
        {"sliding_window_pattern": 6, "global_head_dim": 512},
        last_full=True,
    ),
    "cohere2": Rule("cohere2/configuration_cohere2.py", {"sliding_window_pattern": 4}),
    "cohere2_moe": Rule("cohere2_moe/configuration_cohere2_moe.py", types=_cohere2_moe),
    "olmo3": Rule("olmo3/configuration_olmo3.py", {"sliding_window_pattern": 4}),
    "dory": Rule("dory/configuration_dory.py", {"sliding_window_pattern": 4}, prepare=_dory),
    "kolibri1": Rule("kolibri1/configuration_kolibri1.py", {"sliding_window_pattern": 5}),
    "beam": Rule("beam/configuration_beam.py", types=_EVERY_6TH_AND_LAST),
    "cwm": Rule("cwm/configuration_cwm.py", types=_EVERY_4TH_FROM_0),
    "granite_swa": Rule("granite_swa/configuration_granite_swa.py", types=_EVERY_4TH_FROM_0),
    "granitemoe_swa": Rule("granitemoe_swa/configuration_granitemoe_swa.py", types=_EVERY_4TH_FROM_0),
    "flint": Rule(
        "flint/configuration_flint.py", types=sliding_unless(lambda i, n: i < 2 or i % 4 == 1 or i == n - 1)
    ),
    "mimo_v2_flash": Rule(
        "mimo_v2_flash/modeling_mimo_v2_flash.py",
        types=sliding_unless(lambda i, n: i == 0 or (i + 1) % 6 == 0),
        prepare=_mimo_v2,
    ),
    "muse_glimmer_text": Rule(
        "muse_glimmer/configuration_muse_glimmer.py", types=sliding_unless(lambda i, n: (n - 1 - i) % 4 == 0)
    ),
    "modernbert-decoder": Rule(
        "modernbert_decoder/configuration_modernbert_decoder.py",
        types=sliding_unless(lambda i, n: i % 3 == 0),
        prepare=_modernbert_decoder,
    ),
    "smollm3": Rule("smollm3/configuration_smollm3.py", types=_smollm3),
    "cohere_compass_text": Rule("cohere_compass/configuration_cohere_compass.py", types=each(lambda i, n: FULL)),
    "laguna": Rule("laguna/configuration_laguna.py", types=each(lambda i, n: FULL)),
    "mellum": Rule("mellum/configuration_mellum.py", types=each(lambda i, n: FULL)),
    "step3p7": Rule("step3p7/configuration_step3p7.py", types=each(lambda i, n: FULL)),
    "step3p5": Rule("step3p7/configuration_step3p7.py", types=each(lambda i, n: FULL)),
    "llama4_text": Rule(
        "llama4/configuration_llama4.py", {"attention_chunk_size": 8192, "no_rope_layer_interval": 4}
    ),
    # Recurrent layers by rule of the code.
    "qwen3_next": Rule("qwen3_next/configuration_qwen3_next.py", {"full_attention_interval": 4}),
    "qwen3_5_text": Rule("qwen3_5/configuration_qwen3_5.py", {"full_attention_interval": 4}),
    "qwen3_5_moe_text": Rule("qwen3_5_moe/configuration_qwen3_5_moe.py", {"full_attention_interval": 4}),
    "olmo_hybrid": Rule(
        "olmo_hybrid/configuration_olmo_hybrid.py", {"full_attention_interval": 4}, prepare=_olmo_hybrid
    ),
    "lara_mini": Rule("lara_mini/configuration_lara_mini.py", types=each(lambda i, n: _LARA[i % 5])),
    "minimax": Rule("minimax/configuration_minimax.py", types=each(lambda i, n: LINEAR if i % 2 else FULL)),
    "kimi_linear": Rule(
        "kimi_linear/configuration_kimi_linear.py", types=each(lambda i, n: FULL if i and i % 4 == 0 else LINEAR)
    ),
    "lfm2": Rule("lfm2/configuration_lfm2.py", types=each(lambda i, n: FULL)),
    "lfm2_moe": Rule("lfm2_moe/configuration_lfm2_moe.py", types=each(lambda i, n: FULL)),
    "lfm3": Rule("lfm3/configuration_lfm3.py", types=each(_lfm3)),
    "zamba": Rule("zamba/configuration_zamba.py", types=each(_zamba), prepare=_zamba2),
    "zamba2": Rule("zamba2/configuration_zamba2.py", prepare=_zamba2),
    "falcon_h1": Rule("falcon_h1/configuration_falcon_h1.py", types=each(lambda i, n: HYBRID)),
    "granitemoehybrid": Rule("granitemoehybrid/configuration_granitemoehybrid.py", types=_LINEAR),
    "bamba": Rule("bamba/configuration_bamba.py", types=_LINEAR),
    "mamba": Rule("mamba/configuration_mamba.py", types=_LINEAR),
    "falcon_mamba": Rule("falcon_mamba/configuration_falcon_mamba.py", types=_LINEAR),
    "mamba2": Rule("mamba2/configuration_mamba2.py", types=_LINEAR),
    "inkling_text": Rule("inkling/configuration_inkling.py", types=_HYBRID_BUT_6TH),
    "inkling2_text": Rule("inkling2/configuration_inkling2.py", types=_HYBRID_BUT_6TH),
    "inkling2_loop_text": Rule("inkling2_loop/configuration_inkling2_loop.py", types=_HYBRID_BUT_6TH),
    # Sparse attention.
    "axk2": Rule("axk2/configuration_axk2.py", types=_INDEXED),
    "dots3_note_text": Rule(
        "dots3_note/configuration_dots3_note.py",
        {"sliding_window": 512, "swa_kv_lora_rank": 1024, "swa_qk_rope_head_dim": 64},
        types=_DOTS3,
    ),
    "hy_v4": Rule("hy_v4/configuration_hy_v4.py", {"index_topk_freq": 4, "index_skip_topk_offset": 2}),
    # Counting.
    "longcat_flash": Rule("longcat_flash/modeling_longcat_flash.py", caches_per_layer=2),
    # Caches that cannot be described, and models without one.
    "deepseek_v4": Rule("deepseek_v4/modeling_deepseek_v4.py", refuse=_V4),
    "zaya": Rule("zaya/modeling_zaya.py", refuse=_RECURRENT),
    "qwen4_exp_text": Rule("qwen4_exp/modeling_qwen4_exp.py", refuse=_QSA),
    "xlstm": Rule("xlstm/modeling_xlstm.py", refuse=_RECURRENT),
    "rwkv": Rule("rwkv/modeling_rwkv.py", refuse=_RECURRENT),
    **{name: Rule("rwkv/modeling_rwkv.py", refuse=_RECURRENT) for name in ("rwkv5", "rwkv6", "rwkv7")},
    "reformer": Rule("reformer/modeling_reformer.py", refuse="it caches hashed buckets, not keys and values"),
    "xlnet": Rule("xlnet/modeling_xlnet.py", refuse="it caches hidden states of a segment, not keys and values"),
    "blt": Rule("blt/modeling_blt.py", refuse=_CROSS),
    "trocr": Rule("trocr/modeling_trocr.py", refuse=_CROSS),
    "mllama_text_model": Rule("mllama/modeling_mllama.py", refuse=_CROSS),
    **{
        name: Rule(f"{name.replace('-', '_')}/modeling_{name.replace('-', '_')}.py", refuse=_ENCODER)
        for name in (
            "albert", "bert", "bert-generation", "big_bird", "camembert", "canine", "clip", "convbert", "deberta",
            "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert", "flaubert", "fnet", "funnel", "ibert",
            "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra",
            "nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
            "siglip", "squeezebert", "vit", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
        )
    },
}  # fmt: skip


def rule_for(model_type: str) -> Rule:
    """Return the rule of a model type; an empty one for types that need none."""
    return RULES.get(model_type) or Rule("")


def defaults_for(model_type: str) -> tuple[dict[str, Any], str]:
    """Return what a model's configuration class fills in for absent fields, and the class's file."""
    table = json.loads(Path(__file__).with_name("defaults.json").read_text())
    found = dict(table.get(model_type, {}))
    return found, f"transformers/models/{found.pop('source', '')}"
