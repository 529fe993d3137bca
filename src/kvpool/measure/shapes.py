"""What a row of the bench measures: sizes, and those of real models. Knows no kernel and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvpool.errors import PlanError
from kvpool.kinds import KVKind, LatentKind, LayerSpec
from kvpool.spec import CacheSpec

CASES = ("decode", "prefill", "write", "mla", "copy")


@dataclass(frozen=True, slots=True)
class Shape:
    """What one row measures.

    Attributes:
        case: One of `CASES`.
        rows: Query rows of a sequence (prefill), or tokens of one write.
        v_dim: Size of a value; of the latent's first part for `mla`.
        window: Last tokens a row sees; 0 for all.
        sinks: Whether every query head has an extra logit.
        model: Whose sizes these are, for the table.
    """

    case: str
    codec: str
    layout: str
    tokens_per_block: int
    context: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    threads: int
    rows: int = 1
    v_dim: int = 0
    window: int = 0
    sinks: bool = False
    model: str = ""

    def spec(self) -> CacheSpec:
        """One layer of this shape."""
        if self.case == "mla":
            kind: KVKind | LatentKind = LatentKind(self.v_dim, self.head_dim - self.v_dim)
        else:
            kind = KVKind(self.kv_heads, self.head_dim)
        return CacheSpec((LayerSpec((kind,)),), num_q_heads=self.q_heads, max_seq_len=1 << 20)

    @property
    def blocks_seen(self) -> int:
        """Blocks of a sequence that its rows look at."""
        if not self.window:
            return -(-self.context // self.tokens_per_block)
        first = max(0, self.context - self.rows - self.window + 1)
        return -(-self.context // self.tokens_per_block) - first // self.tokens_per_block

    @property
    def pairs(self) -> int:
        """Query heads times tokens they see, over all rows."""
        ends = range(self.context - self.rows + 1, self.context + 1)
        return self.batch * self.q_heads * sum(min(end, self.window) if self.window else end for end in ends)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attention of one kind of layer of a model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int = 0
    window: int = 0
    sinks: bool = False


#: From the models' config.json.
MODELS: Mapping[str, Sizes] = {
    "llama-3-8b": Sizes(32, 8, 128),
    "llama-3-70b": Sizes(64, 8, 128),
    "qwen3-0.6b": Sizes(16, 8, 128),
    "qwen3-30b-a3b": Sizes(32, 4, 128),
    "gemma-3-4b": Sizes(8, 4, 256),
    "gemma-3-27b-local": Sizes(32, 16, 128, window=1024),
    "gpt-oss-20b": Sizes(64, 8, 64, sinks=True),
    "gpt-oss-20b-local": Sizes(64, 8, 64, window=128, sinks=True),
    "deepseek-v2-lite": Sizes(16, 1, 576, v_dim=512),
    "deepseek-v3": Sizes(128, 1, 576, v_dim=512),
}


def of_model(shape: Shape, name: str) -> Shape:
    """Return `shape` with a model's sizes.

    Raises:
        PlanError: The model is unknown, or its layers are not what the case measures.
    """
    sizes = MODELS.get(name)
    if sizes is None:
        raise PlanError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    if (shape.case == "mla") != bool(sizes.v_dim):
        fitting = [known for known, other in MODELS.items() if bool(other.v_dim) == (shape.case == "mla")]
        raise PlanError(f"bench {shape.case} does not measure {name}; it measures {', '.join(fitting)}")
    return replace(
        shape,
        model=name,
        q_heads=sizes.q_heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        v_dim=sizes.v_dim,
        window=sizes.window,
        sinks=sizes.sinks,
    )
