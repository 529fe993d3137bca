"""The reference backend: readable torch that defines the right answer. Every other backend agrees with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool.backends.base import Attention
from kvpool.backends.states import read_states, write_states
from kvpool.codecs import Counts
from kvpool.kinds import Lifetime
from kvpool.pools import Part, Pools
from kvpool.step import Step, StepBuffers


def visible(query: torch.Tensor, key: torch.Tensor, lifetime: Lifetime) -> torch.Tensor:
    """Which keys a query sees: `[q, n]` bool for positions `query [q]` and `key [n]`."""
    p, j = query[:, None], key[None, :]
    seen = j <= p
    if lifetime.window is not None:
        seen &= (j > p - lifetime.window) | (j < lifetime.sink_tokens)
    if lifetime.chunk is not None:
        seen &= j >= p // lifetime.chunk * lifetime.chunk
    return seen


class ReferenceBackend:
    """Loops over sequences; fp32 softmax and sums."""

    name = "reference"
    replayable = False

    def prepare(self, pools: Pools, buffers: StepBuffers) -> None:
        pass

    def begin(self, step: Step) -> None:
        pass

    def counts(self, part: Part) -> Counts:
        return part.constants.counts

    def forget(self) -> None:
        pass

    def write(self, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step) -> None:
        for part, x in zip(parts, tensors, strict=True):
            self.store(part, x, step.groups[part.group].slots)

    def store(self, part: Part, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode `x [n, H, D]` into `slots [n]`; a slot of -1 writes nothing."""
        keep = slots >= 0
        block, offset = slots[keep] // part.tokens_per_block, slots[keep] % part.tokens_per_block
        constants = part.constants
        constants.freeze()
        stored = constants.maps.store(x[keep])
        encoded = part.codec.encode(stored, part.vector, constants.scale, constants.counts)
        for name, values in encoded.items():
            part.planes[name].tensor[block, :, offset] = values  # [T, H, C]

    def read_states(self, part: Part, slots: torch.Tensor) -> torch.Tensor:
        return read_states(part, slots)

    def write_states(self, part: Part, slots: torch.Tensor, states: torch.Tensor) -> None:
        write_states(part, slots, states)

    def convert(self, source: Part, source_slots: torch.Tensor, part: Part, slots: torch.Tensor) -> None:
        held = source_slots >= 0
        n = source.tokens_per_block
        self.store(part, self.decode(source, source_slots[held] // n, source_slots[held] % n), slots[held])

    def decode(self, part: Part, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Decode the tokens at (block, offset) `[n]`, to fp32 `[n, H, D]`."""
        planes = {name: plane.tensor[block, :, offset] for name, plane in part.planes.items()}
        constants = part.constants
        constants.freeze()
        stored = part.codec.decode(planes, part.vector, constants.scale)
        return constants.maps.restore(stored)

    def read(self, part: Part, slots: torch.Tensor, out: torch.Tensor) -> None:
        held = slots >= 0
        out.zero_()
        out[held] = self.decode(part, slots[held] // part.tokens_per_block, slots[held] % part.tokens_per_block).to(
            out.dtype
        )

    def attend(
        self,
        q: torch.Tensor,
        k: tuple[Part, ...],
        v: Part,
        v_dim: int,
        step: Step,
        options: Attention,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        tables = step.groups[v.group]
        cu_seqlens = step.cu_seqlens.tolist()
        for s in range(step.num_sequences):
            rows = slice(cu_seqlens[s], cu_seqlens[s + 1])
            length = int(tables.seq_lens[s])
            position = torch.arange(length - (rows.stop - rows.start), length)
            token = torch.arange(length)
            block = tables.block_table[s].long()[token // v.tokens_per_block]
            held = block >= 0  # what fell out of the window is not held, and not seen
            token, block = token[held], block[held]
            offset = token % v.tokens_per_block
            seen = visible(position, token, options.lifetime)
            if options.indices is not None:
                slots = block * v.tokens_per_block + offset
                seen &= (options.indices[rows][:, :, None] == slots).any(1)
            if options.tree is not None:
                seen &= _tree_visible(options.tree[rows], token, int(position[0]))
            keys = torch.cat([self.decode(part, block, offset) for part in k], -1)
            values = self.decode(v, block, offset)[..., :v_dim]
            _attend_rows(q[rows], keys, values, seen, options, out[rows], None if lse is None else lse[rows])

    def score(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        part: Part,
        step: Step,
        lifetime: Lifetime,
        indices: torch.Tensor,
    ) -> None:
        tables = step.groups[part.group]
        cu_seqlens = step.cu_seqlens.tolist()
        indices.fill_(-1)
        for s in range(step.num_sequences):
            rows = slice(cu_seqlens[s], cu_seqlens[s + 1])
            length = int(tables.seq_lens[s])
            position = torch.arange(length - (rows.stop - rows.start), length)
            token = torch.arange(length)
            block = tables.block_table[s].long()[token // part.tokens_per_block]
            token, block = token[block >= 0], block[block >= 0]
            offset = token % part.tokens_per_block
            keys = self.decode(part, block, offset)[:, 0]  # [n, Di]
            dots = torch.einsum("qhd,nd->qhn", q[rows].float(), keys).relu()
            scores = (dots * weights[rows].float()[:, :, None]).sum(1)  # [q, n]
            scores = scores.masked_fill(~visible(position, token, lifetime), float("-inf"))
            best = scores.topk(min(indices.shape[1], len(token)), dim=1)
            slots = block * part.tokens_per_block + offset
            indices[rows, : best.indices.shape[1]] = torch.where(best.values.isinf(), -1, slots[best.indices])

    def copy(self, pools: Pools, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        slab = pools.slabs[group]
        for source, destination in pairs:
            for a, b in zip(slab.block_bytes(source), slab.block_bytes(destination), strict=True):
                b.copy_(a)

    def move(self, pools: Pools, group: int, slots: Sequence[tuple[int, int]]) -> None:
        n = pools.plan.groups[group].tokens_per_block
        for pool in pools.plan.groups[group].pools:
            for plane in pool.planes:
                tensor = pools.slabs[group].plane(plane)  # [B, L, F, H, N(, C)]
                for source, destination in slots:
                    tensor[destination // n, :, :, :, destination % n] = tensor[source // n, :, :, :, source % n]


def _tree_visible(masks: torch.Tensor, token: torch.Tensor, first: int) -> torch.Tensor:
    """Draft rows see the sequence before the drafts, and of the drafts those their mask names."""
    row = (token - first).clamp(min=0)  # [n]
    word, bit = row // 64, row % 64
    named = (masks[:, word] >> bit) & 1  # [q, n]
    return (token < first) | named.bool()


def _attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    options: Attention,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend with the rows of one sequence.

    Args:
        q: `[q, Q, D]`.
        keys: `[n, H, D]` fp32.
        values: `[n, H, Dv]` fp32.
        seen: `[q, n]` bool.
        out: `[q, Q, Dv]`, written.
        lse: `[q, Q]` fp32, written; natural logarithm.
    """
    group = q.shape[1] // keys.shape[1]
    # What no row sees may be unwritten memory: NaN times zero must not reach a sum.
    used = seen.any(0)
    keys, values, seen = keys[used], values[used], seen[:, used]
    keys = keys.repeat_interleave(group, 1)  # [n, Q, D]
    values = values.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,nhd->hqn", q.float(), keys) * options.scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        total = torch.cat([logits, sink], -1).logsumexp(-1)
    else:
        total = logits.logsumexp(-1) if logits.shape[-1] else logits.new_full(logits.shape[:2], float("-inf"))
    weights = torch.exp(logits - total[..., None]).nan_to_num(0.0)  # a row that sees nothing has weight 0
    out.copy_(torch.einsum("hqn,nhd->qhd", weights, values))
    if lse is not None:
        empty = ~seen.any(1)  # [q]
        lse.copy_(total.masked_fill(empty, float("-inf")).T)
