"""Which type each layer is of: full, sliding, chunked, linear, ... Reads fields, knows no model."""

from __future__ import annotations

from enum import Enum
from typing import Any

from kvpool.errors import SpecError, UnsupportedError
from kvpool.families.fields import MAX_LAYERS, MAX_TOKENS, Fields


class LayerType(Enum):
    """What a layer does with earlier tokens."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    INDEXED = "indexed"
    LINEAR = "linear"
    CONV = "conv"
    HYBRID = "hybrid"
    HYBRID_SLIDING = "hybrid_sliding"
    NONE = "none"


FULL, SLIDING, CHUNKED, LINEAR = LayerType.FULL, LayerType.SLIDING, LayerType.CHUNKED, LayerType.LINEAR
INDEXED, CONV, NONE = LayerType.INDEXED, LayerType.CONV, LayerType.NONE
HYBRID, HYBRID_SLIDING = LayerType.HYBRID, LayerType.HYBRID_SLIDING

#: Every spelling met in configurations.
NAMES = {
    "full_attention": FULL, "full": FULL, "attention": FULL, "global": FULL, "global_attention": FULL, "*": FULL,
    "sliding_attention": SLIDING, "sliding": SLIDING, "sliding_window": SLIDING, "local": SLIDING, "swa": SLIDING,
    "local_attention": SLIDING, "window_attention": SLIDING, "chunked_attention": CHUNKED, "chunked": CHUNKED,
    "indexed_attention": INDEXED, "deepseek_sparse_attention": INDEXED, "minimax_m3_sparse": INDEXED,
    "linear_attention": LINEAR, "linear": LINEAR, "mamba": LINEAR, "mamba2": LINEAR, "recurrent": LINEAR, "M": LINEAR,
    "kda": LINEAR, "gated_deltanet": LINEAR, "gated_delta_net": LINEAR, "lightning": LINEAR, "ssm": LINEAR,
    "conv": CONV, "short_conv": CONV, "hybrid": HYBRID, "hybrid_sliding": HYBRID_SLIDING,
    "mlp": NONE, "moe": NONE, "ffn": NONE, "-": NONE, "E": NONE, "dummy": NONE, "none": NONE, "no_op": NONE,
}  # fmt: skip
#: Fields that list a type for every layer.
LISTS = ("layer_types", "layers_block_type", "layer_block_types")
#: Names of the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
#: Names of the length of a window.
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")


def count_layers(fields: Fields) -> int:
    """Return the number of layers: what the config says, or the length of its list of types.

    Raises:
        SpecError: Neither is there.
    """
    said = fields.integer(*LAYERS, least=1, most=MAX_LAYERS)
    for name in (*LISTS, "hybrid_override_pattern", "block_configs"):
        listed = fields.data.get(name)
        if said is None and isinstance(listed, list | tuple | str):
            fields.note(f"num_hidden_layers is not in the config: {len(listed)}, the length of {name}")
            return fields.check("num_hidden_layers", len(listed), 1, MAX_LAYERS)
    return said if said is not None else fields.need(*LAYERS)


def layer_type(fields: Fields, field: str, index: int, name: object) -> LayerType:
    """Return the type called `name` in entry `index` of `field`.

    Raises:
        SpecError: The name is unknown, or names a cache that is not known.
    """
    found = NAMES.get(name) if isinstance(name, str) else None
    if found is None:
        if isinstance(name, str) and "cross" in name:
            raise UnsupportedError(f"{fields.where}.{field}[{index}] is {name!r}: cross attention is not supported")
        raise SpecError(
            f"{fields.where}.{field}[{index}] is {str(name)[:60]!r}, and what such a layer stores is not known; known:"
            f" {', '.join(NAMES)}"
        )
    return found


def listed_types(fields: Fields, num_layers: int) -> list[LayerType] | None:
    """Return the type of every layer as the config lists it, or None.

    Raises:
        SpecError: A list is too short, names an unknown type, or leaves a layer out.
    """
    return _listed(fields, num_layers) or _named_layers(fields, num_layers)


def inferred_types(fields: Fields, num_layers: int) -> list[LayerType]:
    """Return the type of every layer as periods, chunks and windows imply it; full where nothing does."""
    return (
        _periodic(fields, num_layers)
        or _chunked(fields, num_layers)
        or _windowed(fields, num_layers)
        or [FULL] * num_layers
    )


def _flags(fields: Fields, name: str, num_layers: int, zero: LayerType, one: LayerType) -> list[LayerType] | None:
    listed = fields.per_layer(name, num_layers, lambda x: x in (0, 1), "0 or 1")
    return None if listed is None else [one if x else zero for x in listed]


def _listed(fields: Fields, num_layers: int) -> list[LayerType] | None:
    """A list or string with an entry for every layer."""
    for name in (*LISTS, "hybrid_override_pattern"):
        listed = fields.per_layer(name, num_layers, lambda x: isinstance(x, str), "the name of a layer type")
        if listed is not None:
            return [layer_type(fields, name, i, x) for i, x in enumerate(listed)]
    if fields.has("block_types"):  # a pattern, repeated
        pattern = fields.get("block_types")
        if not isinstance(pattern, list | tuple) or not pattern:
            raise SpecError(f"{fields.where}.block_types must be a list of layer types, got {str(pattern)[:60]!r}")
        types = [layer_type(fields, "block_types", i, x) for i, x in enumerate(pattern)]
        local = SLIDING if fields.has(*WINDOW) else FULL
        return [local if types[i % len(types)] is FULL else types[i % len(types)] for i in range(num_layers)]
    if fields.has("attention_types"):  # [[[names], repeats], ...]
        return _nested_types(fields, num_layers)
    return _flags(fields, "hybrid_layer_pattern", num_layers, FULL, SLIDING) or _flags(
        fields, "attn_type_list", num_layers, LINEAR, FULL
    )


def _nested_types(fields: Fields, num_layers: int) -> list[LayerType]:
    names: list[Any] = []
    try:
        for pattern, repeats in fields.get("attention_types"):
            names += list(pattern) * fields.check("attention_types", repeats, 0, MAX_LAYERS)
    except (TypeError, ValueError):
        raise SpecError(f"{fields.where}.attention_types must be a list of [names, repeats]") from None
    if len(names) < num_layers:
        raise SpecError(f"{fields.where}.attention_types has {len(names)} entries for {num_layers} layers")
    return [layer_type(fields, "attention_types", i, x) for i, x in enumerate(names[:num_layers])]


def _named_layers(fields: Fields, num_layers: int) -> list[LayerType] | None:
    """Lists of layer numbers: those that attend, or those that slide."""
    linear = fields.section("linear_attn_config")
    if linear is not None:
        full, other = linear.indices("full_attn_layers", num_layers, 1), linear.indices("kda_layers", num_layers, 1)
        if full is not None and other is not None:
            missing = set(range(num_layers)) - full - other
            if missing or full & other:
                raise SpecError(
                    f"{linear.where}: every layer must be in one of full_attn_layers and kda_layers (counted from 1);"
                    f" wrong for {sorted(i + 1 for i in missing | (full & other))[:8]}"
                )
            return [FULL if i in full else LINEAR for i in range(num_layers)]
    for name, inside, outside in (
        ("hybrid_layer_ids", HYBRID, LINEAR),
        ("attn_layer_indices", FULL, LINEAR),
        ("full_attn_idxs", FULL, CONV),
        ("local_layer_ids", HYBRID_SLIDING, HYBRID),
    ):
        layers = fields.indices(name, num_layers)
        if layers is not None:
            return [inside if i in layers else outside for i in range(num_layers)]
    return None


def _periodic(fields: Fields, num_layers: int) -> list[LayerType] | None:
    """A full layer every so many."""
    period = fields.integer("attn_layer_period", most=MAX_LAYERS)
    if period is not None:
        offset = fields.integer("attn_layer_offset", least=0, most=MAX_LAYERS) or 0
        return [FULL if i % period == offset else LINEAR for i in range(num_layers)]
    for name in ("full_attention_interval", "layer_group_size"):
        period = fields.integer(name, most=MAX_LAYERS)
        if period is not None:
            return [LINEAR if (i + 1) % period else FULL for i in range(num_layers)]
    return None


def _chunked(fields: Fields, num_layers: int) -> list[LayerType] | None:
    """Chunks in the layers that rotate positions (`no_rope_layers` has a 1 for those)."""
    if not fields.has("attention_chunk_size"):
        return None
    if fields.data.get("no_rope_layers"):
        return _flags(fields, "no_rope_layers", num_layers, FULL, CHUNKED)
    period = fields.integer("no_rope_layer_interval", most=MAX_LAYERS)
    if period is None:
        fields.note("attention_chunk_size without no_rope_layers: every layer is chunked")
        return [CHUNKED] * num_layers
    return [CHUNKED if (i + 1) % period else FULL for i in range(num_layers)]


def _windowed(fields: Fields, num_layers: int) -> list[LayerType] | None:
    """What a window alone says: which layers have it."""
    if not fields.has(*WINDOW):
        return None
    if not fields.flag("use_sliding_window", True):
        return [FULL] * num_layers
    length = fields.get(*WINDOW)
    if isinstance(length, list | tuple) and len(length) >= num_layers:
        return [SLIDING if x else FULL for x in length[:num_layers]]
    if type(length) is int and length <= 0:
        fields.note(f"a window of {length} is none")
        return [FULL] * num_layers
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        if set(pattern) - {"L", "G"}:
            raise SpecError(f"{fields.where}.sliding_window_pattern must be of L and G, got {pattern[:60]!r}")
        return [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(num_layers)]
    names = ("sliding_window_pattern", "global_attn_every_n_layers", "layer_switch")
    period = fields.integer(*names, least=0, most=MAX_LAYERS)
    if period is not None:
        return [SLIDING if not period or (i + 1) % period else FULL for i in range(num_layers)]
    first = fields.integer("max_window_layers", least=0, most=MAX_LAYERS)
    if first is not None:
        return [SLIDING if i >= first else FULL for i in range(num_layers)]
    fields.note("a window and no list of layer types: every layer slides")
    return [SLIDING] * num_layers


def window_of(fields: Fields) -> int:
    """Return the length of the window.

    Raises:
        SpecError: A layer slides and no length is given.
    """
    return fields.need(*WINDOW, most=MAX_TOKENS)
