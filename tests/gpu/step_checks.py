"""Whole steps: decode replayed from a captured graph, and the engine with steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from compared import REFERENCE, close

from kvpool.backends.base import Attention
from kvpool.backends.triton import TritonBackend
from kvpool.kinds import KVKind, LayerSpec
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec
from kvpool.step import Step, StepBuffers


class _Again:
    """A rehearsal's recorder: runs the pass again."""

    def record(self, run: Callable[[], torch.Tensor]) -> Any:
        return SimpleNamespace(replay=run)


def graphs(device: str) -> None:
    """A captured decode step answers for other contents, lengths and the other buffer."""
    from kvpool.engine.graphs import CudaRecorder, DecodeGraphs

    spec = CacheSpec(layers=(LayerSpec((KVKind(2, 128),)),), max_seq_len=4096)
    plan = make_plan(spec, budget=64 << 20, codec="fp8", tokens_per_block=16, max_sequences=8, max_step_tokens=64)
    pools, mirror_pools = Pools(plan, device), Pools(plan, "cpu")
    first = StepBuffers(plan, device, staged=True)
    buffers = (first, StepBuffers(plan, device, staged=True, share=first))
    backend = TritonBackend(device)
    for b in buffers:
        backend.prepare(pools, b)
    k, v = pools.part(0, "k"), pools.part(0, "v")
    host_k, host_v = mirror_pools.part(0, "k"), mirror_pools.part(0, "v")
    x = torch.empty(8, 3, 8, 128, dtype=torch.bfloat16, device=device)
    out = torch.empty(8, 8, 128, dtype=torch.bfloat16, device=device)

    def forward(step: Step) -> torch.Tensor:
        t = step.total_tokens
        backend.write((k, v), (x[:t, 1, :2], x[:t, 2, :2]), step)
        backend.attend(x[:t, 0], (k,), v, 128, step, Attention(128**-0.5), out[:t], None)
        return out[:t]

    recorded = DecodeGraphs(forward, 8, CudaRecorder() if device != "cpu" else _Again())
    random = np.random.default_rng(0)
    for turn, lengths in enumerate([[9, 1, 40], [900, 3, 8, 130], [1, 64, 65], [2000, 5, 33, 17], [3, 4000]]):
        lengths = lengths if device != "cpu" else [min(n, 70) for n in lengths]
        b = buffers[turn % 2]
        a, g = b.arrays, b.arrays.groups[0]
        ids = random.permutation(plan.groups[0].num_blocks).tolist()
        host = torch.randint(0, 100, mirror_pools.slabs[0].bytes.shape, dtype=torch.uint8)
        for slab in (mirror_pools.slabs[0], pools.slabs[0]):
            size = min(slab.committed_bytes, mirror_pools.slabs[0].committed_bytes)
            slab.bytes[:size].copy_(host[:size])
        for part, other in ((k, host_k), (v, host_v)):  # scales that are numbers
            for p in (part, other):
                p.planes["scale"].tensor[:] = 0.01
        g.block_table.fill(-1)
        for s, n in enumerate(lengths):
            count = -(-n // 16)
            g.block_table[s, :count] = [ids.pop() for _ in range(count)]
            a.num_tokens[s], g.seq_lens[s], a.cu_seqlens[s + 1], a.last_rows[s] = 1, n, s + 1, s
            g.slots[s] = int(g.block_table[s, (n - 1) // 16]) * 16 + (n - 1) % 16
        made = torch.randn(8, 3, 8, 128).to(torch.bfloat16)
        x.copy_(made)
        count = len(lengths)
        decision = SimpleNamespace(sequences=tuple(range(count)), total_tokens=count, num_samples=count)
        step = Step(b, decision, lambda *_: None, recorded.pad_to([1] * count)).start()
        backend.begin(step)
        got = recorded.forward(step)[:count].clone()
        tables = SimpleNamespace(
            slots=torch.from_numpy(g.slots[:count].copy()),
            block_table=torch.from_numpy(g.block_table[:count].copy()),
            seq_lens=torch.from_numpy(g.seq_lens[:count].copy()),
        )
        plain = SimpleNamespace(
            num_sequences=count,
            total_tokens=count,
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
            groups=[tables],
        )
        REFERENCE.write((host_k, host_v), (made[:count, 1, :2], made[:count, 2, :2]), plain)
        want = torch.empty(count, 8, 128)
        REFERENCE.attend(made[:count, 0], (host_k,), host_v, 128, plain, Attention(128**-0.5), want, None)
        close(got, want, torch.bfloat16, f"replayed step {turn}")


def steps_in_flight(device: str) -> None:
    """The engine's answers do not depend on how many steps are in flight, with prompts cut in chunks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvpool.engine import Engine, Params, Sampling

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device)
    spec = CacheSpec.from_config(model.config)
    plan = make_plan(spec, num_blocks=64, codec="fp32", tokens_per_block=16, max_seq_len=256, max_step_tokens=64)
    prompts = torch.randint(3, 512, (5, 70)).tolist()
    words = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), eos_token_id=None)
    answers = []
    for depth in (1, 2):
        engine = Engine(model, words, plan, device=device, steps_in_flight=depth)
        params = [Params(12 + i, Sampling(temperature=0.7 * (i == 4), seed=i), frozenset()) for i in range(5)]
        answers.append([answer.token_ids for answer in engine.generate(prompts, params)])
        engine.cache.check()
        assert engine.cache.stats().used == 0
    assert answers[0] == answers[1]
