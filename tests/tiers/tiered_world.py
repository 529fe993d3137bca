"""A whole cache with tiers below it, and a model that writes what says whose it is."""

from __future__ import annotations

from typing import Any

import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec, Lifetime, StateKind
from kvpool.sequence import Sequence
from storm import content

FULL = (LayerSpec((KVKind(3, 32),)),) * 2
WINDOW = (LayerSpec((KVKind(3, 32),)), LayerSpec((KVKind(2, 64),), Lifetime(window=13)))
CHUNK = (LayerSpec((KVKind(3, 32),)), LayerSpec((KVKind(3, 32),), Lifetime(chunk=24)))
SINKS = (LayerSpec((KVKind(3, 32),), Lifetime(window=9, sink_tokens=5)),)
STATES = (StateKind("conv", (6, 3), "bf16"), StateKind("ssm", (2, 8, 4), "fp32"))
HYBRID = (LayerSpec((KVKind(3, 32),)), LayerSpec(STATES), LayerSpec((KVKind(3, 32), *STATES)))
RECURRENT = (LayerSpec(STATES),) * 2
KINDS = {
    "full": FULL,
    "window": WINDOW,
    "chunk": CHUNK,
    "sinks": SINKS,
    "hybrid": HYBRID,
    "recurrent": RECURRENT,
}
N = 4
PROMPT = list(range(40))


class World:
    """A cache and a model that writes, for each token, what follows from its whole history."""

    def __init__(
        self,
        layers: tuple[LayerSpec, ...] = FULL,
        *,
        num_blocks: int | tuple[int, ...] = 24,
        num_states: int = 0,
        codec: str = "fp32",
        checkpoint_interval: int = 1024,
        **tiers: Any,
    ) -> None:
        self.spec = kv.CacheSpec(layers=layers, dtype="fp32", max_seq_len=1024)
        options: dict[str, Any] = {"codec": codec, "tokens_per_block": N, "max_sequences": 8, "max_step_tokens": 512,
                                   "checkpoint_interval": checkpoint_interval}  # fmt: skip
        roomy = kv.make_plan(self.spec, budget=1 << 26, **options)
        each = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(roomy.groups)
        counts = {
            g.name: num_states if g.is_state and num_states else n for g, n in zip(roomy.groups, each, strict=True)
        }
        sizes = {g.name: -(-g.bytes_per_block * counts[g.name] // 4096) * 4096 for g in roomy.groups}
        budget = sum(sizes.values())
        shares = {name: size / budget for name, size in sizes.items()}
        self.plan = kv.make_plan(self.spec, budget=budget, shares=shares, **options)
        self.cache = kv.KVCache(self.plan, **{"backend": "reference", **tiers})

    @classmethod
    def of(cls, cache: kv.KVCache) -> World:
        """The world of a cache that is there already."""
        world = cls.__new__(cls)
        world.cache, world.spec, world.plan = cache, cache.plan.spec, cache.plan
        return world

    def open(self, tokens: list[int], **options: Any) -> Sequence:
        return self.cache.sequence(tokens, **options)

    def links(self, seq: Sequence, salt: str | None = None) -> list[int]:
        links: list[int] = []
        content.extend(links, content.root(salt), seq.tokens)
        return links

    def kinds(self, layer: int) -> tuple[list[KVKind], list[StateKind]]:
        kinds = self.spec.layers[layer].kinds
        return [k for k in kinds if isinstance(k, KVKind)], [k for k in kinds if isinstance(k, StateKind)]

    def vectors(self, layer: int, links: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        (kind,) = self.kinds(layer)[0]
        k, v = (content.vectors(links, layer, part, kind.num_kv_heads, kind.head_dim) for part in "kv")
        return k, v

    def states(self, layer: int, kind: StateKind, links: list[int]) -> torch.Tensor:
        return content.vectors(links, layer, kind.name, 1, kind.num_elements).view(-1, *kind.shape)

    def step(self, *seqs: Sequence, salt: str | None = None, most: int = 1000) -> list[int]:
        """Compute what is not there; returns how many tokens each sequence computed (0 when it dropped out)."""
        with self.cache.step([(seq, most) for seq in seqs]) as step:
            rows = self.write(step, *seqs, salt=salt)
        return [rows.get(seq.id, 0) for seq in seqs]

    def compute(self, seq: Sequence, salt: str | None = None) -> int:
        """Step until all is computed (with states a step ends at checkpoints); returns how many tokens that took."""
        count = 0
        while seq.num_computed_tokens < len(seq):
            count += self.step(seq, salt=salt)[0]
        return count

    def write(self, step: kv.Step, *seqs: Sequence, salt: str | None = None) -> dict[int, int]:
        """Write what a step computes; returns its tokens by sequence."""
        rows: dict[int, int] = {}
        links: list[int] = []
        before, after = [], []
        for handle, count in zip(step.sequences, step.num_tokens.tolist(), strict=True):
            seq = next(s for s in seqs if s.id == handle)
            first = int(step.positions[len(links)])
            known = self.links(seq, salt)
            before.append(known[first - 1] if first else None)
            links += known[first : first + count]
            after.append(links[-1])
            rows[handle] = count
        for layer in range(len(self.spec.layers) if links else 0):
            attention, states = self.kinds(layer)
            if attention:
                self.cache.write(layer, step, *self.vectors(layer, links))
            for kind in states:
                for link, state in zip(before, self.cache.state_read(layer, step, kind.name), strict=True):
                    want = torch.zeros(kind.shape) if link is None else self.states(layer, kind, [link])[0]
                    assert torch.equal(state.float(), want), f"layer {layer}: {kind.name} is another prefix's"
                self.cache.state_write(layer, step, kind.name, self.states(layer, kind, after))
        return rows

    def verify(self, seq: Sequence, salt: str | None = None) -> None:
        """Read all layers of a sequence and compare every vector it still sees."""
        links = self.links(seq, salt)[: seq.num_computed_tokens]
        for layer, spec in enumerate(self.spec.layers):
            if not self.kinds(layer)[0]:
                continue
            k, v = self.cache.read(layer, seq)
            want_k, want_v = self.vectors(layer, links)
            life, n = spec.lifetime, len(links)
            token = torch.arange(n)
            seen = torch.ones(n, dtype=torch.bool)
            if life.window is not None:
                seen = (token > n - life.window) | (token < life.sink_tokens)
            if life.chunk is not None:
                seen = token >= n // life.chunk * life.chunk
            assert torch.equal(k[seen], want_k[seen])
            assert torch.equal(v[seen], want_v[seen])

    def fill(self, first: int, count: int, length: int = 20) -> None:
        """Push everything out by prompts of their own."""
        for number in range(first, first + count):
            with self.open([number * 1000 + i for i in range(length)]) as seq:
                self.compute(seq)
                self.verify(seq)

    def stats(self, tier: str) -> Any:
        return self.cache.below.stats()[tier]
