"""How many parameters a model has, estimated from its configuration: matrices only. Reads fields, knows no model.

Norms, biases, gates of a few rows and multi-modal parts are left out; most models come out within two per cent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.families.attention import HEADS, HIDDEN, layer_fields, token_kinds
from kvpool.families.fields import MAX_DIM, Fields
from kvpool.families.layer_types import CHUNKED, CONV, FULL, HYBRID, HYBRID_SLIDING, INDEXED, LINEAR, SLIDING, LayerType
from kvpool.families.read import element_type, read_fields, read_types
from kvpool.families.states import state_kinds
from kvpool.kinds import KVKind, LatentKind, StateKind

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "n_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_top_k", "top_k")
INNER = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_inner")
#: Bytes a parameter takes in each weight format, block scales included: NVFP4 has an E4M3 scale for 16 elements, FP8 a
#: fp32 one for 128 x 128.
_BYTES = (
    ("fp32", 4.0),
    ("fp16", 2.0),
    ("bf16", 2.0),
    ("fp8", 1.0 + 4 / 16384),
    ("int8", 1.0),
    ("nvfp4", 0.5625),
    ("int4", 0.53125),
)
FORMATS: dict[str, float] = dict(_BYTES)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Estimated counts.

    Attributes:
        total: All of the text model.
        active: Read to compute one token: with experts, only those chosen.
        embedding: Of `total`, the embedding and the output head; quantised checkpoints keep these in 16 bits.
        num_experts: Routed experts of a layer, 0 for a dense model.
        experts_per_token: Chosen by a token.
        expert: Parameters of one routed expert over all its layers.
        format: Weight format the configuration names.
    """

    total: int
    active: int
    embedding: int
    num_experts: int
    experts_per_token: int
    expert: int
    format: str

    def num_bytes(self, name: str) -> int:
        """Return the bytes of all weights in a format."""
        return int(self.embedding * max(FORMATS[name], 2) + (self.total - self.embedding) * FORMATS[name])

    def step_bytes(self, name: str, batch: int) -> int:
        """Return the bytes of weights read in one decode step of `batch` sequences.

        Of E experts, of which a token takes k, a batch of b reads E * (1 - (1 - k/E)^b) on average.
        """
        always = self.active - self.experts_per_token * self.expert
        read = 0.0
        if self.num_experts:
            read = self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** batch)
        head = self.embedding // 2
        return int((always - self.embedding + read * self.expert) * FORMATS[name] + head * max(FORMATS[name], 2))


def count_parameters(config: Mapping[str, Any], quantisation: Mapping[str, Any] | None = None) -> Parameters:
    """Estimate the parameters of a model.

    Args:
        config: The parsed `config.json`.
        quantisation: The parsed `hf_quant_config.json`, where there is one.

    Raises:
        SpecError: The configuration has no hidden size or number of layers.
    """
    fields, rule, outer = read_fields(config)
    types = read_types(fields, rule)
    hidden = fields.need(*HIDDEN)
    vocab = fields.integer("vocab_size", "padded_vocab_size", most=MAX_DIM) or 0
    tied = outer.data.get("tie_word_embeddings", fields.get("tie_word_embeddings"))
    embedding = vocab * hidden * (1 if tied else 2)
    shared = expert = layers_with_experts = 0
    for index, kind in enumerate(types):
        own = _block(layer_fields(fields, index), index, hidden)
        shared += _mixer(own, kind, hidden) if not own.data.get("no_attention") else 0
        dense, one = _mlp(own, index, hidden)
        shared += dense
        expert += one
        layers_with_experts += one > 0
    experts = (fields.integer(*EXPERTS) or 0) if layers_with_experts else 0
    chosen = min(fields.integer(*CHOSEN) or 1, experts) if experts else 0
    return Parameters(
        embedding + shared + experts * expert,
        embedding + shared + chosen * expert,
        embedding,
        experts,
        chosen,
        expert,
        _format(outer, fields, quantisation),
    )


def _block(fields: Fields, index: int, hidden: int) -> Fields:
    """Apply an entry of `block_configs` (Nemotron-NAS: sizes of the MLP as multiples, layers left out)."""
    blocks = fields.data.get("block_configs")
    if not isinstance(blocks, list | tuple) or index >= len(blocks):
        return fields
    attention, ffn = blocks[index].get("attention") or {}, blocks[index].get("ffn") or {}
    inner = ffn.get("intermediate_size") or -(-int(2 * (ffn.get("ffn_mult") or 0) * hidden / 3) // 256) * 256
    heads = fields.need(*HEADS)
    return fields.overlay(
        {
            "no_attention": bool(attention.get("no_op")),
            "no_mlp": bool(ffn.get("no_op")),
            "intermediate_size": inner or hidden,
            "num_key_value_heads": attention.get("num_key_value_heads")
            or heads // (attention.get("n_heads_in_group") or 1),
        },
        fields.where,
    )


def _mixer(fields: Fields, kind: LayerType, hidden: int) -> int:
    """Parameters of attention and recurrence."""
    total = 0
    if kind in (FULL, SLIDING, CHUNKED, INDEXED, HYBRID, HYBRID_SLIDING):
        heads = fields.need(*HEADS)
        for stored in token_kinds(fields, kind, False):
            if isinstance(stored, LatentKind):
                rope, nope = stored.qk_rope_head_dim, fields.integer("qk_nope_head_dim", least=0) or 0
                value, low = fields.integer("v_head_dim") or nope, fields.integer("q_lora_rank")
                query = heads * (nope + rope)
                total += hidden * low + low * query if low else hidden * query
                total += hidden * (stored.kv_lora_rank + rope) + stored.kv_lora_rank * heads * (nope + value)
                total += heads * value * hidden
                if low and fields.has("index_head_dim"):
                    total += (low * (fields.integer("index_n_heads") or 0) + hidden) * fields.need("index_head_dim")
            elif isinstance(stored, KVKind):
                gate = 2 if fields.data.get("attn_output_gate") or fields.has("linear_num_value_heads") else 1
                total += hidden * heads * (stored.head_dim * gate + stored.v_head_dim)
                total += hidden * stored.num_kv_heads * (stored.head_dim + stored.v_head_dim)
    if kind in (LINEAR, CONV, HYBRID):
        total += _recurrence(fields, kind, hidden)
    return total


def _recurrence(fields: Fields, kind: LayerType, hidden: int) -> int:
    """Projections in and out of a recurrence, from the shapes of its states."""
    states = {s.name: s for s in state_kinds(fields, kind, "bf16") if isinstance(s, StateKind)}
    conv, ssm = states.get("conv"), states.get("ssm")
    if ssm is None:
        return 4 * hidden * hidden if conv is not None else 0
    width = conv.shape[0] if conv is not None else 3 * ssm.shape[0] * ssm.shape[1]
    inner = ssm.shape[0] * (
        1 if len(ssm.shape) < 3 else ssm.shape[2] if fields.has("linear_num_value_heads") else ssm.shape[1]
    )
    return hidden * (width + inner) + inner * hidden


def _mlp(fields: Fields, index: int, hidden: int) -> tuple[int, int]:
    """Return (parameters of dense parts and shared experts, parameters of one routed expert) of a layer."""
    found = fields.data.get("hybrid_override_pattern") or fields.data.get("layers_block_type")
    pattern = list(found) if isinstance(found, str | list | tuple) else []
    alone = pattern[index] if index < len(pattern) else ""
    if fields.data.get("no_mlp"):
        return 0, 0
    if alone in ("M", "mamba", "*", "attention") and {"E", "-", "moe", "mlp"} & set(pattern):
        return 0, 0
    inner = fields.integer(*INNER) or 4 * hidden
    act = str(fields.get("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act") or "")
    gated = any(x in act for x in ("silu", "swish", "swiglu")) or "hidden_activation" in fields.data or not act
    sized = fields.has(*INNER, "moe_intermediate_size") and not fields.has("n_embd")
    matrices = 3 if gated and sized else 2
    experts = fields.integer(*EXPERTS) or 0
    if not experts or alone == "-" or not _has_experts(fields, index):
        return matrices * hidden * (fields.integer("intermediate_size_mlp") or inner), 0
    size = fields.integer("moe_intermediate_size", "expert_ffn_hidden_size") or inner
    latent = fields.integer("moe_latent_size") or hidden
    shared = fields.integer("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", least=0)
    if shared is None and fields.has("intermediate_size_mlp"):
        shared = inner
    if shared is None:
        shared = (fields.integer("n_shared_experts", "num_shared_experts", least=0) or 0) * size
    router = hidden * experts
    return matrices * hidden * shared + router, matrices * latent * size


def _has_experts(fields: Fields, index: int) -> bool:
    types = fields.data.get("mlp_layer_types")
    if isinstance(types, list | tuple) and index < len(types):
        return bool(types[index] != "dense")
    frequency = fields.data.get("moe_layer_freq")
    if isinstance(frequency, list | tuple) and index < len(frequency):
        return bool(frequency[index])
    if index < (fields.integer("first_k_dense_replace", "num_dense_layers", least=0) or 0):
        return False
    if index in (fields.data.get("mlp_only_layers") or ()):
        return False
    step = fields.integer("decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period") or 1
    offset = fields.integer("expert_layer_offset", least=0)
    return index % step == offset if offset is not None else (index + 1) % step == 0


#: Words of quantisation settings, and the format they mean.
_MARKS = (
    ("nvfp4", ("nvfp4", "mxfp4", "fp4")),
    ("fp8", ("fp8", "e4m3", "float-quantized")),
    ("int4", ("awq", "gptq", "int4")),
    ("int8", ("int8", "bitsandbytes")),
)


def _format(outer: Fields, fields: Fields, quantisation: Mapping[str, Any] | None) -> str:
    """Return the weight format a configuration names: its quantisation, else its dtype."""
    sections = [(quantisation or {}).get("quantization"), outer.data.get("quantization_config")]
    sections.append(fields.data.get("quantization_config"))
    for section in sections:
        if isinstance(section, Mapping):
            words = " ".join(str(section.get(k, "")) for k in ("quant_method", "quant_algo", "fmt", "format")).lower()
            for name, marks in _MARKS:
                if any(mark in words for mark in marks):
                    return name
    return element_type(fields, outer)
