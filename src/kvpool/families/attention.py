"""What an attention layer stores: heads, sizes, latents, indexer keys, windows. Reads fields, knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.errors import SpecError
from kvpool.families.fields import MAX_TOKENS, Fields
from kvpool.families.layer_types import CHUNKED, HYBRID_SLIDING, INDEXED, SLIDING, LayerType, window_of
from kvpool.kinds import FULL, IndexerKind, Kind, KVKind, LatentKind, Lifetime

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "num_attention_groups",
)  # fmt: skip
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_head")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim")
#: Fields that may be a list with one entry a layer.
PER_LAYER = (*HEADS, *KV_HEADS, *HEAD_DIM, "v_head_dim", "sliding_window")


def layer_fields(fields: Fields, index: int) -> Fields:
    """Return the fields as one layer sees them: `per_layer_config`, and lists with one entry a layer, applied.

    Raises:
        SpecError: A list is too short for the layer.
    """
    changes: dict[str, Any] = {}
    for name in PER_LAYER:
        value = fields.data.get(name)
        if not isinstance(value, list | tuple):
            value = fields.data.get(f"{name}_per_layer")
        if isinstance(value, list | tuple):
            if index >= len(value):
                raise SpecError(f"{fields.where}.{name} has {len(value)} entries and none for layer {index}")
            changes[name] = value[index]
    overrides = fields.data.get("per_layer_config")
    if isinstance(overrides, Mapping):
        own = overrides.get(index)
        if isinstance(own, Mapping):
            changes.update(own)
    return fields.overlay(changes, f"{fields.where}, layer {index}") if changes else fields


def num_q_heads(fields: Fields) -> int:
    """Return the query heads of an attention layer.

    Raises:
        SpecError: The config does not say.
    """
    return layer_fields(fields, 0).need(*HEADS)


def lifetime_of(fields: Fields, kind: LayerType) -> Lifetime:
    """Return how long a layer of this type needs a token."""
    if kind in (SLIDING, HYBRID_SLIDING):
        sinks = fields.integer("attention_sink_size", "num_sink_tokens", least=0) or 0
        return Lifetime(window=window_of(fields), sink_tokens=sinks)
    if kind is CHUNKED:
        return Lifetime(chunk=fields.need("attention_chunk_size", most=MAX_TOKENS))
    return FULL


def token_kinds(fields: Fields, kind: LayerType, indexed: bool) -> tuple[Kind, ...]:
    """Return what an attention layer stores for every token.

    Args:
        fields: As `layer_fields` gives them.
        kind: The layer's type.
        indexed: Whether the layer has an indexer of its own.
    """
    if fields.get("kv_lora_rank") and fields.flag("use_mla", True):
        if fields.has("head_dim") and "head_dim" in fields.data:
            fields.note("head_dim is ignored: with kv_lora_rank the cache holds latents")
        latent = LatentKind(fields.need("kv_lora_rank"), fields.integer("qk_rope_head_dim", least=0) or 0)
        if kind is SLIDING and "per_layer_config" not in fields.data and fields.has("swa_kv_lora_rank"):
            latent = LatentKind(
                fields.need("swa_kv_lora_rank"),
                fields.integer("swa_qk_rope_head_dim", least=0) or latent.qk_rope_head_dim,
            )
        if indexed and kind not in (SLIDING, CHUNKED):
            return (latent, IndexerKind(fields.need("index_head_dim")))
        return (latent,)
    if kind is INDEXED:
        fields.note("layers with an indexer and without kv_lora_rank: their index keys are not counted")
    return (_heads(fields, kind),)


def _heads(fields: Fields, kind: LayerType) -> KVKind:
    """K and V by head; sliding and full layers may have sizes of their own."""
    heads = fields.need(*HEADS)
    before: dict[str, tuple[str, ...]] = {"kv": (), "dim": (), "v": ()}
    if kind in (SLIDING, HYBRID_SLIDING):
        before = {"kv": ("swa_num_key_value_heads",), "dim": ("swa_head_dim",), "v": ("swa_v_head_dim",)}
        other = fields.section("attention_other_setting")
        if other is not None:
            fields = fields.overlay({k: v for k, v in other.data.items() if k in PER_LAYER}, other.where)
    elif kind is not CHUNKED and "per_layer_config" not in fields.data:
        shared = fields.data.get("attention_k_eq_v")
        before["kv"] = ("num_global_key_value_heads",) if shared is None or shared else ()
        before["dim"] = ("global_head_dim",)
    kv = fields.integer(*before["kv"]) if before["kv"] else None
    kv = _kv_heads(fields, heads) if kv is None else kv
    dim = fields.integer(*before["dim"]) if before["dim"] else None
    dim = _head_dim(fields, heads) if dim is None else dim
    value = fields.integer(*before["v"], "v_head_dim", least=0)
    if kv > heads or heads % kv:
        raise SpecError(f"{fields.where}: {heads} query heads do not divide over {kv} KV heads")
    return KVKind(kv, dim, value or dim)


def _kv_heads(fields: Fields, heads: int) -> int:
    attention = fields.section("attn_config")
    if attention is not None:
        said = attention.integer(*KV_HEADS)
        if said is not None:
            return said
        if attention.data.get("attn_type") == "multiquery_attention":
            return 1
    if fields.has("multi_query_group_num"):
        return fields.need("multi_query_group_num") if fields.flag("multi_query_attention", True) else heads
    # Falcon's older architecture has one KV head whatever num_kv_heads says (falcon/modeling_falcon.py).
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    said = fields.integer(*KV_HEADS)
    if said is None:
        fields.note(f"{KV_HEADS[0]} is not in the config: as many as query heads ({heads})")
        return heads
    return said


def _head_dim(fields: Fields, heads: int) -> int:
    said = fields.integer(*HEAD_DIM, least=0)
    if said:
        return said
    hidden = fields.need(*HIDDEN)
    if hidden % heads:
        raise SpecError(
            f"{fields.where} has no head_dim, and hidden_size {hidden} is no multiple of {heads} heads; add head_dim"
        )
    fields.note(f"head_dim is not in the config: hidden_size / heads = {hidden // heads}")
    return hidden // heads


def indexed_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return which layers have an indexer of their own; the others use an earlier layer's choice of tokens."""
    if not fields.flag("use_dsa", True):
        return [False] * num_layers
    if not (fields.has("index_head_dim") and fields.has("kv_lora_rank")):
        if fields.has("index_head_dim"):
            fields.note("index_head_dim without kv_lora_rank: keys of such an indexer are not counted")
        return [False] * num_layers
    kinds = fields.per_layer("indexer_types", num_layers, lambda x: x in ("full", "shared"), "'full' or 'shared'")
    if kinds is not None:
        return [kind == "full" for kind in kinds]
    pattern = fields.per_layer("index_topk_pattern", num_layers, lambda x: x in ("F", "S", "full", "shared"), "F or S")
    if pattern is not None:
        return [kind in ("F", "full") for kind in pattern]
    period = fields.integer("index_topk_freq", least=0) or 1
    offset = fields.integer("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return [max(i - offset + 1, 0) % period == 0 for i in range(num_layers)]
