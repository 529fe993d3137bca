"""Be the model in a step: write every layer, ask every question a layer can, and verify each answer."""

from __future__ import annotations

from typing import Any

import torch

from kvpool.kinds import IndexerKind, KVKind, LatentKind, SharedKind, StateKind
from kvpool.step import Step

from .world import Fault, Live, Storm, attends

#: How sharp an aimed query is: its target's logit.
AIM = 100.0
#: How far below, of that, all other logits must be, or the answer were not one value.
MARGIN = 0.25
Rows = list[tuple[Live, int, int]]  # sequence, first token, tokens: one a table row


def forward(storm: Storm, step: Step, rows: Rows) -> None:
    """Run all layers over an open step."""
    links = [link for live, first, count in rows for link in live.links[first : first + count]]
    for layer, spec in enumerate(storm.spec.layers):
        tensors, sparse = {}, False
        for kind in spec.kinds:
            if isinstance(kind, StateKind):
                _state(storm, layer, kind, step, rows)
            elif not isinstance(kind, SharedKind):
                names = {KVKind: ("k", "v"), LatentKind: ("latent", "rope"), IndexerKind: ("index",)}[type(kind)]
                tensors |= {name: storm.given(layer, name, links) for name in names}
                sparse |= isinstance(kind, IndexerKind)
        if tensors:
            storm.cache.write(layer, step, **tensors)
        if attends(spec):
            indices = _score(storm, layer, step, rows) if sparse and storm.rng.random() < 0.5 else None
            _attend(storm, layer, step, rows, indices)
            if storm.rng.random() < 0.2:
                _gather(storm, layer, step, rows)


def _attend(storm: Storm, layer: int, step: Step, rows: Rows, indices: torch.Tensor | None) -> None:
    """Half of the query heads see everything alike (q = 0), half aim at one visible token each."""
    key_parts, value_part, v_dim = storm.parts(layer)
    heads, groups = value_part.num_heads, storm.case.query_groups
    head = torch.arange(heads * groups) // groups
    queries, answers, totals, row0 = [], [], [], 0
    for row, (live, first, count) in enumerate(rows):
        links = live.links[: first + count]
        seen = storm.visible(torch.arange(first, first + count), len(links), storm.lifetime(value_part))  # [q, n]
        if indices is not None:
            slots = _slots(step, value_part, row, len(links))
            seen &= (indices[row0 : row0 + count, :, None] == slots).any(1)
        keys = torch.cat([storm.stored(part, links) for part in key_parts], -1)  # [n, H, D]
        values = storm.stored(value_part, links)[..., :v_dim]
        aimed = torch.rand(count, heads * groups, generator=storm.torch_rng) < 0.5  # [q, Q]
        draw = torch.rand(count, heads * groups, len(links), generator=storm.torch_rng)
        target = (draw * seen[:, None]).argmax(-1)  # [q, Q], always a visible token
        goal = keys[target, head]  # [q, Q, D]
        others = seen[:, None] & (torch.arange(len(links)) != target[..., None])  # [q, Q, n]
        logits = torch.einsum("qhd,nhd->qhn", goal, keys[:, head]) / goal.square().sum(-1, keepdim=True)
        aimed &= logits.masked_fill(~others, -torch.inf).amax(-1) < 1 - MARGIN
        queries.append(goal * (AIM / goal.square().sum(-1, keepdim=True)) * aimed[..., None])
        flat = torch.einsum("qn,nhd->qhd", seen.double(), values.double()) / seen.sum(-1)[:, None, None]
        answers.append(torch.where(aimed[..., None], values[target, head], flat[:, head].float()))
        totals.append(torch.where(aimed, torch.nan, seen.sum(-1)[:, None].float().log()))
        row0 += count
    out, lse = storm.cache.attend(layer, step, torch.cat(queries), scale=1.0, indices=indices, return_lse=True)
    off = (out.float() - torch.cat(answers)).abs().amax(-1)  # [T, Q]
    if not bool((off <= storm.case.tolerance).all()):
        row, q = divmod(int(off.nan_to_num(torch.inf).argmax()), off.shape[1])
        raise Fault(f"layer {layer}, row {row}, query head {q}: attention is off by {float(off[row, q]):.3g}")
    total = torch.cat(totals)
    storm.must(torch.allclose(lse[~total.isnan()], total[~total.isnan()], atol=1e-3), "lse of equal logits")


def _slots(step: Step, part: Any, row: int, num_tokens: int) -> torch.Tensor:
    """Slots `[n]` of a sequence's tokens; -1 where not held."""
    token = torch.arange(num_tokens)
    block = step.groups[part.group].block_table[row].long()[token // part.tokens_per_block]
    return torch.where(block >= 0, block * part.tokens_per_block + token % part.tokens_per_block, -1)


def _score(storm: Storm, layer: int, step: Step, rows: Rows) -> torch.Tensor:
    """Aim each row's indexer query at one token it sees: that token comes first, the others are visible ones."""
    part = storm.cache.pools.part(layer, "index")
    topk, queries, targets = storm.rng.choice([1, 7, 64]), [], []
    for row, (live, first, count) in enumerate(rows):
        links = live.links[: first + count]
        seen = storm.visible(torch.arange(first, first + count), len(links), storm.lifetime(part))
        slots = _slots(step, part, row, len(links))
        target = (torch.rand(count, len(links), generator=storm.torch_rng) * seen).argmax(-1)  # [q]
        goal = storm.stored(part, links)[target]  # [q, 1, Di]
        queries.append((goal / goal.norm(dim=-1, keepdim=True)).expand(-1, 2, -1))
        targets += [(slots[t], {int(s) for s in slots[sees]}) for t, sees in zip(target, seen, strict=True)]
    indices = storm.cache.score(layer, step, torch.cat(queries), torch.ones(len(targets), 2), topk)
    for row, (slot, visible) in enumerate(targets):
        picked = [s for s in indices[row].tolist() if s >= 0]
        storm.must(picked[0] == slot, f"layer {layer}, row {row}: score puts slot {picked[0]} first, not {int(slot)}")
        enough = len(picked) == len(set(picked)) == min(topk, len(visible)) and set(picked) <= visible
        storm.must(enough, f"layer {layer}, row {row}: score picks {picked} of {sorted(visible)}")
    return indices


def _gather(storm: Storm, layer: int, step: Step, rows: Rows) -> None:
    """Everything the step's sequences hold comes out, this step's tokens included."""
    key_parts, value_part, _ = storm.parts(layer)
    *tensors, indptr = storm.cache.gather(layer, step)
    for part, tensor in zip(dict.fromkeys((*key_parts, value_part)), tensors, strict=True):
        for row, (live, first, count) in enumerate(rows):
            links = live.links[: first + count]
            seen = storm.visible(torch.arange(first, first + count), len(links), storm.lifetime(part)).any(0)
            storm.same(part, tensor[indptr[row] : indptr[row + 1]], links, seen, f"gather, {live.seq}")


def _state(storm: Storm, layer: int, kind: StateKind, step: Step, rows: Rows) -> None:
    """A state read is that of the token before the step's first; zeros for a new sequence. Then it moves on."""
    part = storm.cache.pools.part(layer, kind.name)
    after = storm.given(layer, kind.name, [live.links[first + count - 1] for live, first, count in rows])
    after = after.view(-1, *kind.shape)
    if not part.codec.quantised and storm.rng.random() < 0.5:
        view, read, write_view, write = storm.cache.state(layer, step, kind.name)
        got = torch.where((read >= 0).view(-1, *[1] * len(kind.shape)), view[read.clamp(min=0).long()].float(), 0.0)
        write_view[write.long()] = after.to(write_view.dtype)
    else:
        got = storm.cache.state_read(layer, step, kind.name).float()
        storm.cache.state_write(layer, step, kind.name, after)
    for row, (live, first, _) in enumerate(rows):
        want = storm.stored(part, [live.links[first - 1]])[0, 0] if first else torch.zeros(kind.num_elements)
        right = torch.equal(got[row].flatten(), want)
        storm.must(right, f"{live.seq}: layer {layer}, state {kind.name} is not that after {first} tokens")
