"""Small caches with known contents: pools of any kind, codec and layout, and a step over permuted, poisoned blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec


@dataclass
class Scene:
    """A cache of two layers and one ragged step.

    Attributes:
        rows: Rows of every sequence.
        lengths: Tokens of every sequence, the rows included.
        poisoned: Every stored byte is 0xFF at first; else memory that nobody reads is not touched.
    """

    kind: Any
    codec: Any
    layout: str = "HND"
    lifetime: Lifetime = FULL
    tokens_per_block: int = 8
    rows: tuple[int, ...] = (1, 3, 1)
    lengths: tuple[int, ...] = (21, 40, 1)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"
    spread: float = 1.0
    poisoned: bool = True
    pools: Pools = field(init=False)
    step: Any = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        spec = CacheSpec(layers=(LayerSpec(kinds, self.lifetime),) * 2, max_seq_len=4096)
        blocks = sum(-(-n // self.tokens_per_block) for n in self.lengths) + 3
        plan = make_plan(
            spec, 64 << 20, codec=self.codec, layout=self.layout, tokens_per_block=self.tokens_per_block,
            max_sequences=16, max_step_tokens=256,
        )  # fmt: skip
        self.pools = Pools(plan, self.device)
        self.random = torch.Generator().manual_seed(self.seed)
        for slab in self.pools.slabs if self.poisoned else ():
            slab.bytes[: slab.committed_bytes].fill_(0xFF)  # NaN in every float format
        permuted = torch.randperm(blocks, generator=self.random).tolist()
        width = max(-(-n // self.tokens_per_block) for n in self.lengths)
        table = np.full((len(self.lengths), width), -1, np.int32)
        for s, n in enumerate(self.lengths):
            for m in range(-(-n // self.tokens_per_block)):
                table[s, m] = permuted.pop()
        self.table = table
        self.step = self._step(table)

    def _step(self, table: np.ndarray) -> Any:
        rows, lengths = np.array(self.rows, np.int32), np.array(self.lengths, np.int32)
        slots = np.concatenate([
            [self.slot(s, p) for p in range(n - r, n)] for s, (r, n) in enumerate(zip(rows, lengths, strict=True))
        ])  # fmt: skip
        group = SimpleNamespace(
            slots=torch.from_numpy(slots.astype(np.int64)).to(self.device),
            block_table=torch.from_numpy(table).to(self.device),
            seq_lens=torch.from_numpy(lengths).to(self.device),
        )
        cu = torch.from_numpy(np.concatenate([[0], rows.cumsum()]).astype(np.int32)).to(self.device)
        arrays = SimpleNamespace(num_tokens=rows, groups=[SimpleNamespace(seq_lens=lengths)] * len(self.pools.slabs))
        buffers = SimpleBuffers(arrays, cu)
        return SimpleNamespace(
            num_sequences=len(rows), total_tokens=int(rows.sum()), cu_seqlens=cu, buffers=buffers, padded=False,
            groups=[group] * len(self.pools.slabs),
        )  # fmt: skip

    def slot(self, s: int, position: int) -> int:
        n = self.tokens_per_block
        return int(self.table[s, position // n]) * n + position % n

    def all_slots(self) -> torch.Tensor:
        """Slots of every token of every sequence."""
        slots = [self.slot(s, p) for s, n in enumerate(self.lengths) for p in range(n)]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=self.random) * self.spread
        return x.to(self.dtype).to(self.device)

    def parts(self, *names: str) -> tuple[Any, ...]:
        """Parts of layer 1, their constant scales set where the codec needs one (different for each)."""
        found = tuple(self.pools.part(1, name) for name in names)
        for factor, part in enumerate(found, 1):
            if part.codec.constant_scale and part.constants.scale is None:
                part.constants.set(scale=0.01 * factor)
        return found

    def filled(self, *names: str) -> tuple[Any, ...]:
        """The same, with random vectors stored at every token by the codecs' own torch maths."""
        found = self.parts(*names)
        slots = self.all_slots()
        for part in dict.fromkeys(found):
            x = self.normal(len(slots), part.num_heads, part.vector.dim)
            x[..., 0] *= 3.0
            encoded = part.codec.encode(x, part.vector, part.constants.scale)
            for name, values in encoded.items():
                n = part.tokens_per_block
                part.planes[name].tensor[slots // n, :, slots % n] = values
        return found


class SimpleBuffers:
    """Stands for `StepBuffers`: hashable by identity."""

    def __init__(self, arrays: Any, cu_seqlens: torch.Tensor) -> None:
        self.arrays = arrays
        self.token_ids = cu_seqlens
        self.root = self


KV = KVKind(num_kv_heads=2, head_dim=64)
LATENT = LatentKind(kv_lora_rank=48, qk_rope_head_dim=16)
WIDE_LATENT = LatentKind(kv_lora_rank=256, qk_rope_head_dim=32)
INDEXER = IndexerKind(index_head_dim=128)
