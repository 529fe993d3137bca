"""The device's memory: blocks far beyond its start, pools that grow and shrink, blocks in host memory and back."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from compared import close

from kvpool.backends.base import Attention
from kvpool.backends.triton import TritonBackend
from kvpool.kinds import KVKind, LayerSpec
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec
from kvpool.step import Step, StepBuffers
from kvpool.tiers.base import Entry, Identity, pack_tokens
from kvpool.tiers.host import HostTier
from kvpool.tiers.mover import DeviceMover, HostMover, mover_for


def high_ids(device: str) -> None:
    """Blocks beyond 2^31 elements are written, read, attended to and copied where they are, and nowhere else."""
    spec = CacheSpec(layers=(LayerSpec((KVKind(8, 128),)),) * 8, max_seq_len=64)
    plan = make_plan(spec, budget=12 << 30, codec="bf16", tokens_per_block=16, max_sequences=4, max_step_tokens=64)
    pools = Pools(plan, device)
    last = plan.groups[0].num_blocks - 1
    k, v = pools.part(7, "k"), pools.part(7, "v")
    assert last * k.planes["data"].tensor.stride(0) > 2**31
    buffers = StepBuffers(plan, device, staged=True)
    backend = TritonBackend(device)
    backend.prepare(pools, buffers)
    tables = buffers.arrays.groups[0]
    tables.block_table[0, :2] = last - 1, last
    tables.slots[:20] = [(last - 1) * 16 + i for i in range(20)]
    buffers.arrays.num_tokens[0], buffers.arrays.cu_seqlens[1], tables.seq_lens[0] = 20, 20, 20
    step = Step(buffers, SimpleNamespace(sequences=(0,), total_tokens=20, num_samples=0), lambda *_: None).start()
    backend.begin(step)
    x = torch.randn(3, 20, 8, 128, generator=torch.Generator().manual_seed(0))
    x = x.to(torch.bfloat16).to(device)
    low = k.planes["data"].tensor[:4].clone()
    backend.write((k, v), (x[0], x[1]), step)
    assert torch.equal(k.planes["data"].tensor[last, :, :4].transpose(0, 1), x[0, 16:])
    assert torch.equal(k.planes["data"].tensor[:4].view(torch.int16), low.view(torch.int16))
    back = torch.empty(20, 8, 128, dtype=torch.bfloat16, device=device)
    backend.read(v, step.groups[0].slots, back)
    assert torch.equal(back, x[1])
    out = torch.empty_like(back)
    backend.attend(x[2], (k,), v, 128, step, Attention(128**-0.5), out, None)
    q, keys, values = (t.float().cpu().transpose(0, 1) for t in (x[2], x[0], x[1]))
    want = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True).transpose(0, 1)
    close(out, want, torch.bfloat16, "attention to high ids")
    backend.copy(pools, 0, [(last, 1)])
    assert torch.equal(k.planes["data"].tensor[1, :, :4].transpose(0, 1), x[0, 16:])


def memory(device: str) -> None:
    """Pools grow and shrink at their end; addresses and contents stay."""
    spec = CacheSpec(layers=(LayerSpec((KVKind(8, 128),)),) * 4, max_seq_len=1024)
    plan = make_plan(spec, budget=64 << 20, max_budget=256 << 20, codec="bf16", tokens_per_block=16)
    pools = Pools(plan, device)
    slab, tensor = pools.slabs[0], pools.part(3, "v").planes["data"].tensor
    address, blocks = slab.address, slab.num_blocks
    tensor[0] = 3.0
    tensor[blocks - 1] = 5.0
    slab.resize(2 * blocks)
    tensor[2 * blocks - 1] = 7.0
    assert bool((tensor[blocks - 1] == 5.0).all())
    slab.resize(blocks // 2)
    assert bool((tensor[0] == 3.0).all())
    slab.resize(blocks)
    assert slab.address == address
    if device != "cpu":
        from kvpool.pools.cuda import VirtualMemory

        assert isinstance(slab.memory, VirtualMemory), "virtual memory management is not in use here"


class _AtOnce:
    """A rehearsal's side stream: makes a copy when it is started."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def wait(self) -> None:
        pass


def tiers(device: str) -> None:
    """Blocks go to pinned host memory and come back on a side stream, behind what the device was given before."""
    spec = CacheSpec(layers=(LayerSpec((KVKind(8, 128),)),) * 4, max_seq_len=1024)
    plan = make_plan(spec, budget=32 << 20, codec="bf16", tokens_per_block=16)
    pools = Pools(plan, device)
    slab, size = pools.slabs[0], plan.groups[0].bytes_per_block
    mover = (
        DeviceMover(pools.slabs, _AtOnce, HostMover().reserve) if device == "cpu" else mover_for(device, pools.slabs)
    )
    tier = HostTier(16 * size, [size], Identity({"check": "gpu"}), mover)
    blocks = list(range(0, plan.groups[0].num_blocks, 2))[:8]
    entries = [Entry(0, bytes([b]) * 16, pack_tokens([b])) for b in blocks]
    batch = [(entry, ((slab.address + b * size, size),)) for entry, b in zip(entries, blocks, strict=True)]
    for b in blocks:
        slab.block_bytes(b)[0].fill_(b + 1)
    assert all(outcome.ok for outcome in tier.put(batch).outcomes)
    slab.bytes[: slab.committed_bytes].fill_(0xFF)
    assert all(outcome.ok for outcome in tier.get(batch).outcomes)
    for b in range(plan.groups[0].num_blocks):
        assert bool((slab.block_bytes(b)[0] == (b + 1 if b in blocks else 0xFF)).all()), f"block {b}"
    tier.check()
    tier.close()
