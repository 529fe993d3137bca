"""What a layer stores, as data. Knows no codec, no layout, no model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvpool.errors import PlanError, SpecError


def _positive(owner: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (type(value) is not int or value <= 0):
            raise SpecError(f"{owner}.{name} must be a positive integer, got {value!r}")


def shard_heads(num_heads: int, tp_size: int, what: str) -> int:
    """Return the heads one of `tp_size` ranks holds: an equal share, or one that several ranks repeat.

    Raises:
        PlanError: Neither number divides the other.
    """
    if num_heads % tp_size == 0:
        return num_heads // tp_size
    if tp_size % num_heads == 0:
        return 1
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    raise PlanError(
        f"{num_heads} {what} cannot be split over tp_size={tp_size} ranks; use a divisor of {num_heads}"
        f" ({', '.join(map(str, divisors[:8]))}{', ...' if len(divisors) > 8 else ''}) or a multiple of it"
    )


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a token of a layer is needed: the key that puts layers into one group.

    Attributes:
        window: Tokens seen, itself included; None for all.
        chunk: Tokens of a local chunk; None for none.
        sink_tokens: First tokens that a window never drops.
    """

    window: int | None = None
    chunk: int | None = None
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        _positive("Lifetime", window=self.window, chunk=self.chunk)
        if self.window is not None and self.chunk is not None:
            raise SpecError(f"a layer has a window ({self.window}) or a chunk ({self.chunk}), not both")
        if self.sink_tokens < 0 or (self.sink_tokens and self.window is None):
            raise SpecError(f"sink_tokens needs a window and must not be negative, got {self.sink_tokens}")

    @property
    def name(self) -> str:
        """`full`, `window-4096`, `window-4096+sink-4`, `chunk-8192`."""
        if self.window is not None:
            return f"window-{self.window}" + (f"+sink-{self.sink_tokens}" if self.sink_tokens else "")
        return f"chunk-{self.chunk}" if self.chunk is not None else "full"


FULL = Lifetime()


@dataclass(frozen=True, slots=True)
class KVKind:
    """Keys and values per head (MHA, GQA, MQA).

    Attributes:
        num_kv_heads: H.
        head_dim: D of a key.
        v_head_dim: D of a value; equal to `head_dim` when 0 is given.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        _positive("KVKind", num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.v_head_dim)

    def shard(self, tp_size: int) -> KVKind:
        """Return what one tensor-parallel rank stores: its share of the heads, or one repeated head."""
        return KVKind(shard_heads(self.num_kv_heads, tp_size, "KV heads"), self.head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class LatentKind:
    """An MLA latent: `kv_lora_rank` values read as K and V, then the rope part read as K only."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        _positive("LatentKind", kv_lora_rank=self.kv_lora_rank)
        if self.qk_rope_head_dim < 0:
            raise SpecError(f"LatentKind.qk_rope_head_dim must not be negative, got {self.qk_rope_head_dim}")

    def shard(self, tp_size: int) -> LatentKind:
        """Return itself: every rank needs the whole latent."""
        return self


@dataclass(frozen=True, slots=True)
class IndexerKind:
    """The small extra keys by which sparse attention (DSA) picks tokens; one head."""

    index_head_dim: int
    quant_block: int = 128

    def __post_init__(self) -> None:
        _positive("IndexerKind", index_head_dim=self.index_head_dim, quant_block=self.quant_block)

    def shard(self, tp_size: int) -> IndexerKind:
        """Return itself: every rank picks tokens for itself."""
        return self


@dataclass(frozen=True, slots=True)
class StateKind:
    """A fixed-size recurrent state of a sequence.

    Attributes:
        name: `conv`, `ssm` or another name unique in its layer.
        shape: Logical shape; a convolution keeps `kernel - 1` columns.
        dtype: Element type the model computes it in (`fp32`, `bf16`).
        heads: How axis 0 splits over tensor-parallel ranks: (heads, rows a head) of each part it is made of, in
            order; empty when every rank keeps the whole state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    heads: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.shape:
            raise SpecError(f"state {self.name!r} has an empty shape")
        for extent in self.shape:
            _positive(f"StateKind({self.name!r})", shape=extent)
        if self.heads and sum(n * rows for n, rows in self.heads) != self.shape[0]:
            raise SpecError(f"state {self.name!r}: heads {self.heads} do not add up to {self.shape[0]} rows")

    def shard(self, tp_size: int) -> StateKind:
        """Return what one tensor-parallel rank keeps: its share of the heads of every part of axis 0."""
        if not self.heads:
            return self
        heads = tuple((shard_heads(n, tp_size, f"heads of the {self.name} state"), rows) for n, rows in self.heads)
        rows = sum(n * size for n, size in heads)
        return StateKind(self.name, (rows, *self.shape[1:]), self.dtype, heads)

    @property
    def num_elements(self) -> int:
        """Elements of one state."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n


@dataclass(frozen=True, slots=True)
class SharedKind:
    """Stores nothing: reads the keys and values of another layer."""

    source_layer: int

    def shard(self, tp_size: int) -> SharedKind:
        """Return itself."""
        return self


Kind: TypeAlias = KVKind | LatentKind | IndexerKind | StateKind | SharedKind


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: what it stores and for how long.

    Attributes:
        kinds: Any of KV or latent, an indexer beside a latent or KV, states; or one `SharedKind`; empty for a
            layer without cache.
        lifetime: Of its token kinds; states have a lifetime of their own.
    """

    kinds: tuple[Kind, ...] = ()
    lifetime: Lifetime = FULL
