"""CacheSpec: the layers of a model and what each stores. Knows no codec, no layout, no budget."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import SpecError
from kvpool.kinds import LayerSpec, SharedKind


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a model keeps per token and per sequence, layer by layer.

    Attributes:
        layers: One entry a layer, in the model's order.
        dtype: The model's own element type (`bf16`, `fp16`, `fp32`).
        num_q_heads: Query heads of an attention layer (for grouping and advice), 0 when unknown.
        max_seq_len: Longest sequence the model was made for, in tokens.
        model: Name of the architecture, for messages only.
        notes: Every inference that was made, one sentence each.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "bf16"
    num_q_heads: int = 0
    max_seq_len: int = 8192
    model: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(layer.kinds for layer in self.layers):
            raise SpecError(f"model {self.model!r} has no layer that stores anything")
        for index, layer in enumerate(self.layers):
            for kind in layer.kinds:
                if isinstance(kind, SharedKind) and not (
                    0 <= kind.source_layer < self.num_layers and self.layers[kind.source_layer].kinds
                ):
                    raise SpecError(f"layer {index} reads layer {kind.source_layer}, which stores nothing")

    @property
    def num_layers(self) -> int:
        """Number of layers, those without a cache included."""
        return len(self.layers)
