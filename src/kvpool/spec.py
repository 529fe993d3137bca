"""CacheSpec: the layers of a model and what each stores. Knows no codec, no layout, no budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import SpecError
from kvpool.families import read_model
from kvpool.kinds import LayerSpec, SharedKind

#: A configuration is text of at most this size.
MAX_CONFIG_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a model keeps per token and per sequence, layer by layer.

    Attributes:
        layers: One entry a layer, in the model's order.
        dtype: The model's own element type (`bf16`, `fp16`, `fp32`).
        num_q_heads: Query heads of an attention layer (for grouping and advice), 0 when unknown.
        max_seq_len: Longest sequence the model was made for, in tokens.
        model: Name of the architecture, for messages only.
        kv_codec_hint: Codec that the checkpoint's own KV quantisation corresponds to; empty when it has none. Nothing
            applies it.
        notes: Every inference that was made, one sentence each.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "bf16"
    num_q_heads: int = 0
    max_seq_len: int = 8192
    model: str = ""
    kv_codec_hint: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(layer.kinds for layer in self.layers):
            raise SpecError(f"model {self.model!r} has no layer that stores anything")
        if self.max_seq_len < 1:
            raise SpecError(f"max_seq_len must be positive, got {self.max_seq_len}")
        for index, layer in enumerate(self.layers):
            for kind in layer.kinds:
                if isinstance(kind, SharedKind) and not (
                    0 <= kind.source_layer < self.num_layers
                    and self.layers[kind.source_layer].kinds
                    and not any(isinstance(k, SharedKind) for k in self.layers[kind.source_layer].kinds)
                ):
                    raise SpecError(f"layer {index} reads layer {kind.source_layer}, which stores nothing")

    @property
    def num_layers(self) -> int:
        """Number of layers, those without a cache included."""
        return len(self.layers)

    @classmethod
    def from_config(cls, config: object) -> CacheSpec:
        """Read a model's configuration, from the JSON alone.

        Args:
            config: A path to `config.json` or to its directory, the parsed object, or anything with `to_dict()` (a
                transformers config).

        Raises:
            SpecError: The file cannot be read, a field is missing or wrong, or the model has no KV cache.
        """
        data, hints = load_config(config)
        model = read_model(data, hints)
        return cls(
            model.layers,
            model.dtype,
            model.num_q_heads,
            model.max_seq_len,
            model.name,
            model.kv_codec_hint,
            model.notes,
        )


def load_config(config: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parsed configuration and, when one lies beside it, the parsed `hf_quant_config.json`.

    Args:
        config: A path to `config.json` or to its directory, the parsed object, or anything with `to_dict()`.

    Raises:
        SpecError: It cannot be read.
    """
    if isinstance(config, Mapping):
        return dict(config), {}
    if isinstance(config, str | Path):
        path = Path(config)
        if path.is_dir():
            beside = path / "hf_quant_config.json"
            return _read_json(path / "config.json"), _read_json(beside) if beside.is_file() else {}
        beside = (
            path.with_suffix(".hf_quant.json") if path.name != "config.json" else path.parent / "hf_quant_config.json"
        )
        return _read_json(path), _read_json(beside) if beside.is_file() else {}
    to_dict = getattr(config, "to_dict", None)
    data = to_dict() if callable(to_dict) else None
    if not isinstance(data, dict):
        raise SpecError(
            f"a config is a path, a directory, a dict or an object with to_dict(), got {type(config).__name__}"
        )
    return data, {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise SpecError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; that is no model configuration")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data
