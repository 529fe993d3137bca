"""The parts of one layer by their role in attention, resolved once. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, Lifetime
from kvpool.pools.views import Part

if TYPE_CHECKING:
    from kvpool.pools import Pools


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What attention reads and writes at one layer.

    Attributes:
        k: Parts that make up a key, one after another.
        v: Part that holds values; None for a layer without attention.
        v_dim: Elements of a value.
        index: Indexer keys, or None.
        lifetime: Which positions a row sees.
        default_scale: `D ** -0.5`.
    """

    k: tuple[Part, ...]
    v: Part | None
    v_dim: int
    index: Part | None
    lifetime: Lifetime
    default_scale: float

    @classmethod
    def of(cls, pools: Pools, layer: int) -> LayerParts:
        """Resolve a layer; one that shares another's cache gets that layer's parts."""
        source = pools.plan.source_layer(layer)
        k: tuple[Part, ...] = ()
        v, v_dim, index, lifetime = None, 0, None, FULL
        for kind in pools.plan.spec.layers[source].kinds:
            if isinstance(kind, KVKind):
                k, v, v_dim = (pools.part(source, "k"),), pools.part(source, "v"), kind.v_head_dim
            elif isinstance(kind, LatentKind):
                latent = pools.part(source, "latent")
                whole = latent.vector.dim == kind.kv_lora_rank + kind.qk_rope_head_dim
                k = (latent,) if whole else (latent, pools.part(source, "rope"))
                v, v_dim = latent, kind.kv_lora_rank
            elif isinstance(kind, IndexerKind):
                index = pools.part(source, "index")
        if v is not None:
            lifetime = pools.plan.groups[v.group].lifetime or FULL
        dim = sum(part.vector.dim for part in k)
        return cls(k, v, v_dim, index, lifetime, dim**-0.5 if dim else 1.0)
