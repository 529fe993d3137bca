"""Which codec stores which part of which layer: `codec=` of `make_plan`, resolved. Knows parts and names, no bytes."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.codecs import get_codec
from kvpool.errors import PlanError
from kvpool.kinds import IndexerKind, KVKind, LatentKind, StateKind
from kvpool.spec import CacheSpec

#: Parts a codec can be named for.
PARTS = ("k", "v", "latent", "rope", "index", "conv", "ssm")
#: Keys a codec mapping may have.
CODEC_KEYS = ("*", *PARTS, "layers")
#: The codec of indexer keys unless another is named: what the models' own kernels store.
INDEX_CODEC = "index-fp8"

CodecChoice = str | Mapping[str, object] | None


def resolve_codecs(codec: CodecChoice, spec: CacheSpec) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    """Return, for every layer, the codec name of each part; and what of `codec` names nothing in this model.

    Args:
        codec: A name for K, V and latents; or a mapping with the keys `*`, `k`, `v`, `latent`, `rope`, `index`,
            names of states, and `layers` ({0: "bf16", -1: "bf16"} or a mapping of the same form for one layer).
        spec: The model.

    Raises:
        PlanError: A key, codec or layer is unknown.
    """
    kinds = {kind for layer in spec.layers for kind in layer.kinds}
    states = {kind.name for kind in kinds if isinstance(kind, StateKind)}
    base = expand(spec.dtype, {"index": INDEX_CODEC}, states)
    if codec is not None:
        base = expand(codec, base, states)
    layers = [base] * spec.num_layers
    overrides = codec.get("layers", {}) if isinstance(codec, Mapping) else {}
    if not isinstance(overrides, Mapping):
        raise PlanError(f"codec['layers'] must map layer numbers to codecs, got {overrides!r}")
    for index, given in overrides.items():
        if type(index) is not int or not -spec.num_layers <= index < spec.num_layers:
            raise PlanError(
                f"codec['layers'] names layer {index!r}; the model has layers 0..{spec.num_layers - 1} (-1 is the last)"
            )
        layers[index] = expand(given, base, states)
    notes = []
    if isinstance(codec, Mapping):
        has = set(states)
        for kind in kinds:
            has |= {"k", "v"} if isinstance(kind, KVKind) else set()
            has |= {"latent", "rope"} if isinstance(kind, LatentKind) else set()
            has |= {"index"} if isinstance(kind, IndexerKind) else set()
        unused = [key for key in codec if key in PARTS and key not in has]
        if unused:
            notes.append(f"codec: this model stores no {', '.join(unused)}, so nothing changed by naming it")
    return layers, tuple(notes)


def expand(given: object, base: Mapping[str, str], states: set[str]) -> dict[str, str]:
    """Return `base` with what `given` (a name or a mapping) says about one layer's parts."""
    if isinstance(given, str):
        get_codec(given)
        return {**base, **dict.fromkeys(("k", "v", "latent", "rope"), given)}
    if not isinstance(given, Mapping):
        raise PlanError(f"codec must be a name or a mapping of parts to names, got {given!r}")
    out = dict(base)
    if "*" in given:
        out = expand(_name("*", given["*"]), out, states)
    for key, name in given.items():
        if key not in CODEC_KEYS and key not in states:
            allowed = (*CODEC_KEYS, *sorted(states - set(PARTS)))
            raise PlanError(f"codec mapping has the key {key!r}; allowed: {', '.join(allowed)}")
        if key in ("*", "layers"):
            continue
        out[key] = _name(key, name)
        if key == "latent" and "rope" not in given:
            out["rope"] = out[key]
    return out


def _name(key: str, name: object) -> str:
    if not isinstance(name, str):
        raise PlanError(f"codec[{key!r}] must be the name of a codec, got {name!r}")
    get_codec(name)
    return name
