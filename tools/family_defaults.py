"""Write src/kvpool/families/defaults.json: what transformers' configuration classes fill in for an absent field.

Reads the class bodies only. Run by hand when the pinned transformers changes:
    python tools/family_defaults.py src/kvpool/families/defaults.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any

#: Fields that decide about a cache, and whether the head is the embedding. Everything else is left out.
CACHE_FIELDS = frozenset(
    """
    num_hidden_layers n_layer n_layers num_layers hidden_size n_embd d_model num_attention_heads n_head n_heads
    num_heads attention_heads num_key_value_heads num_kv_heads n_head_kv multi_query multi_query_group_num
    new_decoder_architecture head_dim v_head_dim kv_channels attention_head_dim global_head_dim
    num_global_key_value_heads swa_num_key_value_heads swa_num_attention_heads swa_head_dim swa_v_head_dim
    max_position_embeddings n_positions n_ctx max_seq_len sliding_window sliding_window_pattern
    use_sliding_window max_window_layers window_size attention_window_size local_attention
    global_attn_every_n_layers attention_chunk_size layer_group_size block_types
    prefix_dense_sliding_window_pattern kv_lora_rank qk_rope_head_dim swa_kv_lora_rank swa_qk_rope_head_dim
    index_head_dim index_topk indexer_head_dim num_kv_shared_layers linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_head_dim linear_num_heads
    short_conv_kernel_size attn_layer_period attn_layer_offset conv_L_cache conv_kernel conv_kernel_size
    sconv_kernel_size conv1d_width lru_width expand state_size ssm_state_size n_groups mamba_num_heads
    mamba_head_dim mamba_d_state mamba_d_conv mamba_expand mamba_d_ssm mamba_n_heads mamba_d_head mamba_n_groups
    n_mamba_heads mamba_ngroups tie_word_embeddings
    """.split()  # noqa: SIM905 (a list of so many words does not read)
)


def defaults_of(config_class: type) -> dict[str, Any]:
    """Return the class's defaults of `CACHE_FIELDS`, except None."""
    out: dict[str, Any] = {}
    for field in fields(config_class):
        value = getattr(config_class, field.name, None) if field.default is None else field.default
        if field.name in CACHE_FIELDS and isinstance(value, bool | int | str | list | tuple):
            out[field.name] = list(value) if isinstance(value, tuple) else value
    return out


def families() -> dict[str, dict[str, Any]]:
    """Return {model_type: {"source": file, field: default}} of every causal language model and its text part."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION

    classes: dict[str, type] = {}
    for name in (*CAUSAL, *VISION):
        outer = CONFIG_MAPPING[name]
        classes[name] = outer
        text = getattr(outer, "sub_configs", {}).get("text_config")
        if text is not None and getattr(text, "model_type", ""):
            classes.setdefault(text.model_type, text)
    out = {}
    for name, config_class in sorted(classes.items()):
        found = defaults_of(config_class)
        if found:
            source = config_class.__module__.removeprefix("transformers.models.").replace(".", "/") + ".py"
            out[name] = {"source": source, **found}
    return out


def main(path: str) -> None:
    """Write the table to `path`."""
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in families().items()]
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
