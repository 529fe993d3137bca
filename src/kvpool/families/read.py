"""Reads a configuration: which layers there are and what each stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpool.dtypes import DTYPES, dtype
from kvpool.errors import PlanError, SpecError, UnsupportedError
from kvpool.families import attention
from kvpool.families.fields import MAX_TOKENS, Fields
from kvpool.families.layer_types import (
    CONV,
    FULL,
    HYBRID,
    HYBRID_SLIDING,
    LINEAR,
    NONE,
    LayerType,
    count_layers,
    inferred_types,
    listed_types,
)
from kvpool.families.rules import Rule, defaults_for, rule_for
from kvpool.families.states import state_kinds
from kvpool.kinds import KVKind, LayerSpec, SharedKind

#: Where a configuration of several parts keeps its text model.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config", "decoder")
#: Names of the longest sequence.
SEQ_LEN = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx",
    "model_max_length", "context_length", "max_context_length",
)  # fmt: skip
#: Longest sequence where the config does not say.
DEFAULT_SEQ_LEN = 8192
#: What a checkpoint's KV quantisation is called here.
KV_ALGORITHMS = {"FP8": "fp8-tensor", "NVFP4": "nvfp4", "INT8": "int8-tensor"}
#: Type and bits of a `kv_cache_scheme`, and the algorithm they are.
KV_SCHEMES = (("float8", "FP8"), ("float4", "NVFP4"), ("int8", "INT8"))


@dataclass(frozen=True, slots=True)
class Model:
    """What a configuration says about the cache."""

    layers: tuple[LayerSpec, ...]
    dtype: str
    num_q_heads: int
    max_seq_len: int
    name: str
    kv_codec_hint: str
    notes: tuple[str, ...]


def read_model(config: Mapping[str, Any], quantisation: Mapping[str, Any] | None = None) -> Model:
    """Read a configuration.

    Args:
        config: The parsed `config.json`.
        quantisation: The parsed `hf_quant_config.json`, where there is one.

    Raises:
        SpecError: A field is missing or wrong, or the model has no KV cache, or one that is not known.
        UnsupportedError: The model attends to an encoder.
    """
    fields, rule, outer = read_fields(config)
    name = _name(fields, outer)
    element = element_type(fields, outer)
    types = read_types(fields, rule)
    layers = _layers(fields, types, element)
    layers = _looped(fields, _shared(fields, types, layers))
    if rule.caches_per_layer > 1:
        layers = [layer for layer in layers for _ in range(rule.caches_per_layer)]
        fields.note(f"every layer attends {rule.caches_per_layer} times ({_source(rule)}): {len(layers)} caches")
    _remarks(fields)
    heads = attention.num_q_heads(fields) if any(_has_heads(layer) for layer in layers) else 0
    longest = fields.integer(*SEQ_LEN, most=MAX_TOKENS)
    if longest is None:
        fields.note(f"the longest sequence is not in the config: {DEFAULT_SEQ_LEN} tokens")
    return Model(
        tuple(layers),
        element,
        heads,
        longest or DEFAULT_SEQ_LEN,
        name or "unnamed model",
        _codec_hint(outer, quantisation),
        tuple(fields.notes),
    )


def read_fields(config: Mapping[str, Any]) -> tuple[Fields, Rule, Fields]:
    """Return the fields of the text part with what its code fills in, its rule, and the fields of the whole.

    Raises:
        SpecError: The model has no KV cache, or one that is not known.
        UnsupportedError: The model attends to an encoder.
    """
    outer = Fields(config)
    inner = _text_part(outer)
    name = _name(inner, outer)
    rule = rule_for(name)
    _refuse(outer, inner, rule, name)
    return _with_defaults(inner, rule, name), rule, outer


def read_types(fields: Fields, rule: Rule) -> list[LayerType]:
    """Return the type of every layer: as listed, else as the model's code has it, else as other fields imply.

    Raises:
        SpecError: The fields contradict each other or do not say.
    """
    num_layers = count_layers(fields)
    types = listed_types(fields, num_layers)
    if types is None:
        types = rule.types(fields, num_layers) if rule.types else _unlisted(fields, num_layers)
        if rule.types:
            fields.note(f"the types of the layers are not in the config: as {_source(rule)} has them")
    if rule.last_full and types[-1] is not FULL:
        types[-1] = FULL
        fields.note(f"the last layer is a full one, as {_source(rule)} has it")
    return types


def _name(fields: Fields, outer: Fields) -> str:
    return str(fields.data.get("model_type") or outer.data.get("model_type") or "")


def _text_part(outer: Fields) -> Fields:
    """Return the part of a configuration that describes the decoder."""
    fields = outer
    for _ in range(4):
        name = next((n for n in NESTED if isinstance(fields.data.get(n), Mapping)), None)
        if name is None:
            return fields
        section = fields.section(name)
        assert section is not None
        fields = section
    raise SpecError(f"{fields.where}: parts are nested too deeply")


def _source(rule: Rule) -> str:
    return f"transformers/models/{rule.source}"


def _with_defaults(fields: Fields, rule: Rule, name: str) -> Fields:
    """Add what the model's own code fills in for absent fields."""
    defaults, source = defaults_for(name)
    defaults.update(rule.assumes)
    out = Fields(fields.data, fields.where, fields.notes, defaults, source if not rule.source else _source(rule))
    changes = dict(rule.prepare(out)) if rule.prepare else {}
    own = fields.data.get("per_layer_config")
    if isinstance(own, Mapping):  # JSON has text for keys, and some writers pad it with zeros
        changes["per_layer_config"] = {int(key): value for key, value in own.items() if str(key).isdigit()}
    return out.overlay(changes, out.where) if changes else out


def _refuse(outer: Fields, fields: Fields, rule: Rule, name: str) -> None:
    """Raise for models without a KV cache and for caches that are not known."""
    decoder = outer.flag("is_decoder") or fields.flag("is_decoder")
    if rule.refuse and not (decoder and "encoder" in rule.refuse):
        raise SpecError(f"{name} has no plan: {rule.refuse} ({_source(rule)})")
    if outer.flag("is_encoder_decoder") or fields.flag("is_encoder_decoder") or fields.flag("add_cross_attention"):
        raise UnsupportedError(f"{name or 'this model'} attends to an encoder: cross attention is not supported")
    if fields.data.get("cross_attention_layers"):
        raise UnsupportedError(f"{name or 'this model'} has cross_attention_layers: cross attention is not supported")
    names = outer.data.get("architectures")
    causal = isinstance(names, list | tuple) and any("CausalLM" in str(n) or "Conditional" in str(n) for n in names)
    if fields.has("type_vocab_size") and not decoder and not causal:
        raise SpecError(
            f"{name or 'this model'} has no plan: type_vocab_size marks an encoder, which keeps no KV cache"
        )


def _unlisted(fields: Fields, num_layers: int) -> list[LayerType]:
    """Types from periods and windows; a recurrence without any of these is only clear when nothing attends."""
    types = inferred_types(fields, num_layers)
    if LINEAR in types or not fields.has("mamba_d_state", "state_size", "ssm_state_size", "linear_num_value_heads"):
        return types
    if not fields.has("num_attention_heads", "n_head"):
        return [LINEAR] * num_layers
    if fields.has("mamba_d_ssm"):
        return [HYBRID] * num_layers
    raise SpecError(
        f"{fields.where} has recurrent and attention layers and does not say which are which; add layer_types"
    )


def _layers(fields: Fields, types: list[LayerType], element: str) -> list[LayerSpec]:
    indexed = attention.indexed_layers(fields, len(types))
    blocks = fields.data.get("block_configs")
    if blocks is not None:
        return [_block_config(fields, blocks, index) for index in range(len(types))]
    layers: list[LayerSpec] = []
    for index, kind in enumerate(types):
        own = attention.layer_fields(fields, index)
        if kind is NONE:
            layers.append(LayerSpec())
        elif kind in (LINEAR, CONV):
            layers.append(LayerSpec(state_kinds(own, kind, element)))
        else:
            kinds = attention.token_kinds(own, kind, indexed[index])
            if kind in (HYBRID, HYBRID_SLIDING):
                kinds += state_kinds(own, kind, element, kinds)
            layers.append(LayerSpec(kinds, attention.lifetime_of(own, kind)))
    return layers


def _block_config(fields: Fields, blocks: Any, index: int) -> LayerSpec:
    """One entry of `block_configs` (Nemotron-NAS): heads by group size, or no attention at all."""
    try:
        block = blocks[index]["attention"]
        skip = bool(block.get("no_op") or block.get("replace_with_linear"))
        group, said, window = (
            block.get("n_heads_in_group"),
            block.get("num_key_value_heads"),
            block.get("window_length"),
        )
    except (TypeError, KeyError, IndexError, AttributeError):
        raise SpecError(f"{fields.where}.block_configs[{index}] has no object 'attention'") from None
    if skip:
        return LayerSpec()
    heads = fields.need(*attention.HEADS)
    if said is None:
        if type(group) is not int or group < 1 or heads % group:
            raise SpecError(
                f"{fields.where}.block_configs[{index}]: n_heads_in_group {group!r} does not divide {heads}"
            )
        said = heads // group
    changes = {"num_key_value_heads": said, **({"sliding_window": window} if window else {})}
    own = fields.overlay(changes, f"{fields.where}.block_configs[{index}]")
    kind = LayerType.SLIDING if window else FULL
    return LayerSpec(attention.token_kinds(own, kind, False), attention.lifetime_of(own, kind))


def _shared(fields: Fields, types: list[LayerType], layers: list[LayerSpec]) -> list[LayerSpec]:
    """Apply the ways in which layers read the cache of others."""
    count = len(layers)
    sources = list(range(count))
    given = fields.per_layer("kv_source_layers", count, lambda x: type(x) is int and 0 <= x < count, "a layer")
    shared = fields.integer("num_kv_shared_layers", least=0, most=count) or 0
    if given is not None:
        sources = given
    elif shared:
        first = count - shared
        for index in range(first, count):
            same = [i for i in range(first) if types[i] is types[index]]
            if not same:
                raise SpecError(
                    f"layer {index} shares its cache, and no {types[index].value} layer before {first} has one"
                )
            sources[index] = same[-1]
    elif fields.flag("use_cla"):
        factor = fields.need("cla_share_factor", most=count)
        sources = [i - i % factor for i in range(count)]
    out = list(layers)
    for index, source in enumerate(sources):
        if source != index:
            out[index] = replace(layers[index], kinds=(SharedKind(source),))
    if out != layers:
        fields.note(f"{sum(s != i for i, s in enumerate(sources))} layers read the cache of another layer")
    return out


def _looped(fields: Fields, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Append the caches of layers that run several times, pass after pass: each pass has caches of its own."""
    if fields.has("loop_num_passes"):
        passes = fields.need("loop_num_passes", most=1000)
        start, stop = fields.need("loop_layer_index_start", least=0), fields.need("loop_layer_index_end", least=0)
    elif fields.has("n_recurrent_loops"):
        kept = fields.data.get("recurrent_kv_cache_mode", "per_loop") == "per_loop"
        passes = fields.need("n_recurrent_loops", most=1000) if kept else 1
        start = fields.need("n_input_layers", least=0)
        stop = len(layers) - fields.need("n_output_layers", least=0)
    else:
        return layers
    if not 0 <= start <= stop <= len(layers):
        raise SpecError(f"{fields.where}: layers {start} to {stop} are looped, and there are {len(layers)}")
    extra = layers[start:stop] * (passes - 1)
    if extra:
        fields.note(f"layers {start}..{stop - 1} run {passes} times: {len(extra)} caches follow those of the layers")
    return layers + extra


def _has_heads(layer: LayerSpec) -> bool:
    return any(not isinstance(kind, SharedKind) for kind in layer.kinds) and any(
        isinstance(kind, KVKind) or hasattr(kind, "kv_lora_rank") for kind in layer.kinds
    )


def _remarks(fields: Fields) -> None:
    """Say what the config mentions and the cache does not count."""
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules"):
        value = fields.data.get(name)
        if type(value) is int and value > 0:
            fields.note(f"{name} is {value}: layers for multi-token prediction are not counted")
    sparse = fields.section("sparse_attention_config")
    if sparse is not None:
        fields.note(
            "sparse_attention_config: the extra index keys of its sparse layers are not counted; the config names no"
            " element type for them"
        )
    if fields.data.get("compress_ratios"):
        fields.note(
            "compress_ratios: only the window is counted; this model also keeps compressed entries (one for 4 or 128"
            " tokens) and their indexer keys, so that it takes more memory than this plan says"
        )
    if fields.data.get("attention_k_eq_v"):
        fields.note("attention_k_eq_v: full layers make K and V from one projection; both are stored")


def element_type(fields: Fields, outer: Fields) -> str:
    """Return the model's element type: `torch_dtype` or `dtype` of the text part, else of the whole."""
    for part in (fields, outer):
        name = part.data.get("dtype") or part.data.get("torch_dtype")
        if isinstance(name, str) and name != "auto":
            try:
                return dtype(name).name
            except PlanError:
                raise SpecError(f"{part.where}: dtype {name!r} is unknown; known: {', '.join(DTYPES)}") from None
    fields.note("the dtype is not in the config: bf16")
    return "bf16"


def _codec_hint(outer: Fields, quantisation: Mapping[str, Any] | None) -> str:
    """Return the codec that the checkpoint's own quantisation asks for, or an empty string; a hint, never applied."""
    found: Any = None
    if quantisation:
        section = quantisation.get("quantization")
        found = section.get("kv_cache_quant_algo") if isinstance(section, Mapping) else None
    own = outer.data.get("quantization_config")
    if found is None and isinstance(own, Mapping):
        found = own.get("kv_cache_quant_algo")
        scheme = own.get("kv_cache_scheme")
        if found is None and isinstance(scheme, Mapping):
            kind = f"{scheme.get('type')}{scheme.get('num_bits')}"
            found = dict(KV_SCHEMES).get(kind, kind)
    if not found:
        return ""
    hint = KV_ALGORITHMS.get(str(found).upper(), "")
    outer.note(
        f"the checkpoint is made for a KV cache in {found}: "
        + (f"codec='{hint}' with its scales would match" if hint else "no codec here corresponds")
    )
    return hint
