"""Reads a configuration: which layers there are and what each stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.dtypes import DTYPES, dtype
from kvpool.errors import PlanError, SpecError
from kvpool.families.fields import MAX_LAYERS, MAX_TOKENS, Fields
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime


@dataclass(frozen=True, slots=True)
class Model:
    """What a configuration says about the cache."""

    layers: tuple[LayerSpec, ...]
    dtype: str
    num_q_heads: int
    max_seq_len: int
    name: str
    notes: tuple[str, ...]


def read_model(config: Mapping[str, Any]) -> Model:
    """Read a configuration.

    Raises:
        SpecError: A field is missing or wrong, or the model has no KV cache.
    """
    fields = Fields(config)
    if isinstance(config.get("text_config"), Mapping):
        fields = Fields(config["text_config"], "text_config", fields.notes)
    num_layers = fields.need("num_hidden_layers", "n_layer", "num_layers", "n_layers", most=MAX_LAYERS)
    heads = fields.need("num_attention_heads", "n_head", "n_heads")
    layers: list[LayerSpec] = []
    for _ in range(num_layers):
        if fields.has("kv_lora_rank"):
            kinds: list[Any] = [
                LatentKind(fields.need("kv_lora_rank"), fields.integer("qk_rope_head_dim", least=0) or 0)
            ]
            if fields.has("index_head_dim"):
                kinds.append(IndexerKind(fields.need("index_head_dim")))
            layers.append(LayerSpec(tuple(kinds)))
        else:
            kv = fields.integer("num_key_value_heads", "num_kv_heads") or (1 if fields.flag("multi_query") else heads)
            dim = fields.integer("head_dim", "kv_channels") or fields.need("hidden_size", "n_embd") // heads
            layers.append(LayerSpec((KVKind(kv, dim),)))
    window = fields.integer("sliding_window", most=MAX_TOKENS)
    if window is not None and fields.flag("use_sliding_window", True):
        types = fields.get("layer_types") or ["sliding_attention"] * num_layers
        layers = [
            LayerSpec(layer.kinds, Lifetime(window=window) if kind == "sliding_attention" else FULL)
            for layer, kind in zip(layers, types, strict=True)
        ]
    return Model(
        tuple(layers),
        _dtype(fields, config),
        heads,
        fields.integer("max_position_embeddings", "n_positions", "seq_length", most=MAX_TOKENS) or 8192,
        str(fields.get("model_type") or ""),
        tuple(fields.notes),
    )


def _dtype(fields: Fields, config: Mapping[str, Any]) -> str:
    name = fields.get("torch_dtype", "dtype") or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    try:
        return dtype(str(name)).name
    except PlanError:
        raise SpecError(f"dtype {name!r} is unknown; known: {', '.join(DTYPES)}") from None
