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


class _Layer:
    """A layer of fp8 on a device, the same on the host for the reference, and the tensors its decode steps work on."""

    def __init__(self, device: str) -> None:
        spec = CacheSpec(layers=(LayerSpec((KVKind(2, 128),)),), max_seq_len=4096)
        plan = make_plan(spec, budget=64 << 20, codec="fp8", tokens_per_block=16, max_sequences=8, max_step_tokens=64)
        self.num_blocks = plan.groups[0].num_blocks
        self.pools = Pools(plan, device), Pools(plan, "cpu")
        (self.k, self.v), (self.host_k, self.host_v) = ([p.part(0, name) for name in "kv"] for p in self.pools)
        first = StepBuffers(plan, device, staged=True)
        self.buffers = (first, StepBuffers(plan, device, staged=True, share=first))
        self.backend = TritonBackend(device)
        for buffers in self.buffers:
            self.backend.prepare(self.pools[0], buffers)
        self.x = torch.empty(8, 3, 8, 128, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(8, 8, 128, dtype=torch.bfloat16, device=device)

    def forward(self, step: Step) -> torch.Tensor:
        """Write and attend with what is in `x`; what a graph captures."""
        t = step.total_tokens
        x, out = self.x[:t], self.out[:t]
        self.backend.write((self.k, self.v), (x[:, 1, :2], x[:, 2, :2]), step)
        self.backend.attend(x[:, 0], (self.k,), self.v, 128, step, Attention(128**-0.5), out, None)
        return out

    def scramble(self) -> None:
        """Put the same random codes into both, with scales that are numbers."""
        slabs = [pools.slabs[0] for pools in self.pools]
        size = min(slab.committed_bytes for slab in slabs)
        codes = torch.randint(0, 100, (size,), dtype=torch.uint8)
        for slab in slabs:
            slab.bytes[:size].copy_(codes)
        for part in (self.k, self.v, self.host_k, self.host_v):
            part.planes["scale"].tensor[:] = 0.01

    def fill(self, buffers: StepBuffers, lengths: list[int], random: np.random.Generator) -> Any:
        """Write the tables of a decode step of so long sequences in random blocks; return the reference's step."""
        arrays, tables = buffers.arrays, buffers.arrays.groups[0]
        ids = random.permutation(self.num_blocks).tolist()
        tables.block_table.fill(-1)
        for s, n in enumerate(lengths):
            tables.block_table[s, : -(-n // 16)] = [ids.pop() for _ in range(-(-n // 16))]
            tables.seq_lens[s] = n
            tables.slots[s] = int(tables.block_table[s, (n - 1) // 16]) * 16 + (n - 1) % 16
            arrays.num_tokens[s], arrays.cu_seqlens[s + 1], arrays.last_rows[s] = 1, s + 1, s
        count = len(lengths)
        names = ("slots", "block_table", "seq_lens")
        group = SimpleNamespace(**{name: torch.from_numpy(getattr(tables, name)[:count].copy()) for name in names})
        first_rows = torch.arange(count + 1, dtype=torch.int32)
        return SimpleNamespace(num_sequences=count, total_tokens=count, cu_seqlens=first_rows, groups=[group])

    def reference(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what `forward` should."""
        REFERENCE.write((self.host_k, self.host_v), (x[:, 1, :2], x[:, 2, :2]), step)
        want = torch.empty(len(x), 8, 128)
        REFERENCE.attend(x[:, 0], (self.host_k,), self.host_v, 128, step, Attention(128**-0.5), want, None)
        return want


def graphs(device: str) -> None:
    """A captured decode step answers for other contents, lengths and the other buffer."""
    from kvpool.engine.graphs import CudaRecorder, DecodeGraphs

    layer = _Layer(device)
    recorded = DecodeGraphs(layer.forward, 8, CudaRecorder() if device != "cpu" else _Again())
    random = np.random.default_rng(0)
    for turn, lengths in enumerate([[9, 1, 40], [900, 3, 8, 130], [1, 64, 65], [2000, 5, 33, 17], [3, 4000]]):
        lengths = lengths if device != "cpu" else [min(n, 70) for n in lengths]
        buffers, count = layer.buffers[turn % 2], len(lengths)
        layer.scramble()
        plain = layer.fill(buffers, lengths, random)
        x = torch.randn(8, 3, 8, 128).to(torch.bfloat16)
        layer.x.copy_(x)
        decision = SimpleNamespace(sequences=tuple(range(count)), total_tokens=count, num_samples=count)
        step = Step(buffers, decision, lambda *_: None, recorded.pad_to([1] * count)).start()
        layer.backend.begin(step)
        got = recorded.forward(step)[:count].clone()
        close(got, layer.reference(x[:count], plain), torch.bfloat16, f"replayed step {turn}")


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
