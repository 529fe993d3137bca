"""Random models of every family, small enough to build in milliseconds: hidden size 64, four layers, vocabulary 256."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 256
#: Does not divide a block of 16 tokens.
WINDOW = 8

_BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_GPT = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_HEAD16 = {"head_dim": 16}
_MOE = {**_HEAD16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "num_key_value_heads": 4,
}  # fmt: skip
_DEEPSEEK = {
    **_MLA, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Many heads: where all of them give 0 (one token in four with two heads) the top tokens tie, and any may be taken.
_DSA = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}
_GEMMA = {**_HEAD16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
_GEMMA4 = {
    **_HEAD16, "sliding_window": WINDOW, "num_hidden_layers": 6, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 16, "mamba_n_groups": 1,
}  # fmt: skip
_GDN = {
    **_HEAD16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_ALTERNATE = ["linear_attention", "full_attention"] * 2

#: Family -> (model type, fields of its configuration beside the common ones).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("qwen3", _HEAD16),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_windows": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"sliding_window": None, **_LOCAL_EXPERTS}),
    "phi3": ("phi3", {"sliding_window": None, "original_max_position_embeddings": 512}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 6}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4_shared": (
        "gemma4_text",
        {**_GEMMA4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gpt_oss": ("gpt_oss", {**_HEAD16, "sliding_window": WINDOW, **_LOCAL_EXPERTS}),
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", {**_GPT, "multi_query": True}),
    "falcon": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW}),
    "llama4": (
        "llama4_text",
        {**_HEAD16, "attention_chunk_size": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1,
         "intermediate_size_mlp": 64},
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_HEAD16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "minimax_m2": ("minimax_m2", {**_HEAD16, **_LOCAL_EXPERTS}),
    "deepseek_v2": ("deepseek_v2", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "minicpm3": ("minicpm3", _MLA),
    "longcat_flash": (
        "longcat_flash",
        {**_MLA, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "n_routed_experts": 4,
         "zero_expert_num": 2, "moe_topk": 2, "head_dim": 16},
    ),
    "deepseek_v32": ("deepseek_v32", {**_DEEPSEEK, **_DSA, "head_dim": 16}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_DEEPSEEK, **_DSA}),
    "kimi_linear": (
        "kimi_linear",
        {**_MLA, "q_lora_rank": None, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_experts_per_tok": 2,
         "n_group": 1, "topk_group": 1, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4,
         "layer_types": _ALTERNATE},
    ),
    "qwen3_next": ("qwen3_next", {**_GDN, **_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", _GDN),
    "jamba": (
        "jamba",
        {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
         "mamba_dt_rank": 8},
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1, 3], **_MAMBA2}),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], **_HEAD16, "mamba_num_heads": 8,
         "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
         "n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    ),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 128, **_MAMBA2}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention"] * 2, **_LOCAL_EXPERTS, "shared_intermediate_size": 32, **_MAMBA2},
    ),
    "zamba2": (
        "zamba2",
        {"num_key_value_heads": 4, "mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1,
         "chunk_size": 16, "num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 8,
         "layers_block_type": ["mamba", "hybrid"] * 2},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "minimax": ("minimax", {**_HEAD16, **_LOCAL_EXPERTS, "layer_types": _ALTERNATE, "block_size": 16}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"lru_width": 64, "attention_window_size": WINDOW, "block_types": ["recurrent", "recurrent", "attention"],
         "num_key_value_heads": 1},
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {"num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 32,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "o_groups": 2, "o_lora_rank": 16,
         "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "hc_mult": 2, "num_nextn_predict_layers": 0,
         "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
                         "heavily_compressed_attention"],
         "mlp_layer_types": ["moe"] * 4, "partial_rotary_factor": 0.5,
         "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    ),
}  # fmt: skip
_WITHOUT_BASE = {"gpt2", "gpt_bigcode"}
_CHAOTIC = {"zamba2", "nemotron_h"}
_FEWER = {
    "falcon": {"num_key_value_heads", "intermediate_size"},
    "nemotron_h": {"num_hidden_layers"},
    "mamba": {"num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"},
    "mamba2": {"num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"},
}


def tiny(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **over: Any) -> PreTrainedModel:
    """Build a family's model with random weights; `over` replaces fields of its configuration."""
    model_type, fields = FAMILIES[name]
    base = {} if name in _WITHOUT_BASE else {k: v for k, v in _BASE.items() if k not in _FEWER.get(name, ())}
    # Large enough that a wrong key or position changes the token; smaller where that makes rounding errors grow.
    base["initializer_range"] = 0.1 if name in _CHAOTIC else 0.2
    config = AutoConfig.for_model(model_type, **{**base, **fields, **over})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompts(lengths: list[int], *, seed: int = 0, shared: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and mask `[B, longest]`, padded on the left; all rows share their first `shared` tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB - 6, (n,), generator=generator) for n in lengths]
    for row in rows:
        row[:shared] = rows[0][:shared]
    longest = max(lengths)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - n).long() for n in lengths])
    return ids, mask
