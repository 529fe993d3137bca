"""What do the GPU benchmarks share? Steps over blocks in random order, random contents, and one way to measure."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
import triton

from kvpool.backends.triton import TritonBackend
from kvpool.kinds import FULL, LayerSpec
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec
from kvpool.step import Step, StepBuffers

#: Scales of constant-scale codecs: N(0, 1) fits all of them.
SCALE = 0.02


class Bench:
    """One layer's pools on a device, filled with random vectors, and a step over them.

    Args:
        kind: What the layer stores.
        codec: Of the pools.
        lengths: Tokens of every sequence.
        rows: Rows of every sequence in the step.
        tokens_per_block: Of the plan.
        device: `cuda`, or `cpu` for a rehearsal in the interpreter.
        filled: Random vectors are stored; else the memory is not touched.
    """

    def __init__(self, kind, codec, lengths, rows, *, layout="HND", tokens_per_block=64, device="cuda", filled=True):
        self.device = device
        n = tokens_per_block
        per_sequence = [-(-length // n) for length in lengths]
        spec = CacheSpec(layers=(LayerSpec((kind,), FULL),), max_seq_len=max(lengths))
        self.plan = make_plan(
            spec, num_blocks=sum(per_sequence), codec=codec, layout=layout, tokens_per_block=n,
            max_sequences=len(lengths), max_step_tokens=sum(rows), max_seq_len=max(lengths),
        )  # fmt: skip
        self.pools = Pools(self.plan, device)
        self.buffers = StepBuffers(self.plan, device, staged=True)
        self.backend = TritonBackend(device)
        self.backend.prepare(self.pools, self.buffers)
        ids = np.random.default_rng(0).permutation(sum(per_sequence)).astype(np.int32)
        arrays, tables = self.buffers.arrays, self.buffers.arrays.groups[0]
        first, slots = 0, []
        for s, (length, count, new) in enumerate(zip(lengths, per_sequence, rows, strict=True)):
            tables.block_table[s, :count] = ids[first : first + count]
            position = np.arange(length - new, length)
            slots.append(tables.block_table[s, position // n].astype(np.int64) * n + position % n)
            arrays.num_tokens[s], tables.seq_lens[s] = new, length
            arrays.cu_seqlens[s + 1] = arrays.cu_seqlens[s] + new
            first += count
        total = sum(rows)
        tables.slots[:total] = np.concatenate(slots)
        decision = SimpleNamespace(sequences=tuple(range(len(lengths))), total_tokens=total, num_samples=0)
        self.step = Step(self.buffers, decision, lambda *_: None).start()
        self.backend.begin(self.step)
        self.parts = {name: self.pools.part(0, name) for pool in self.plan.groups[0].pools for name in pool.parts}
        for part in self.parts.values():
            if part.constants.needs_scale:
                part.constants.set(scale=SCALE)
        if filled:
            self.fill()

    def fill(self):
        """Store random vectors everywhere, a batch of tokens again and again."""
        slots = torch.arange(self.plan.groups[0].num_blocks * self.plan.groups[0].tokens_per_block, device=self.device)
        for part in self.parts.values():
            for piece in slots.split(1 << 16):
                shape = (len(piece), part.num_heads, part.vector.dim)
                self.backend.store(part, torch.randn(shape, device=self.device, dtype=torch.bfloat16), piece)

    def bytes_read(self):
        """Bytes of the cache that attention reads: every token of every sequence once, scales included."""
        tokens = int(self.buffers.arrays.groups[0].seq_lens.sum())
        group = self.plan.groups[0]
        return tokens * group.payload_bytes_per_block // group.tokens_per_block


def measure(run: Callable[[], object], device: str, *, captured: bool = True) -> tuple[float, float]:
    """Return (median seconds, spread of the middle half over the median), with a cold L2 before every call.

    A call is replayed from a CUDA graph, as the engine's decode steps are: small ones would else measure how long
    Python takes to launch them, in whoever's library.

    Args:
        run: Once it has been run, waits for nothing and brings nothing from the host.
        device: Where it runs.
        captured: False for what brings something from the host.
    """
    run()
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started, 0.0
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="all")
    low, median, high = statistics.quantiles(times * 2, n=4)  # there may be only one
    return median / 1e3, (high - low) / median


def copy_rate(device: str, size: int = 4 << 30) -> float:
    """Return bytes read and written a second by a large device copy: what the memory gives."""
    size = size if device != "cpu" else 1 << 20
    a = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    seconds, _ = measure(lambda: b.copy_(a), device)
    return 2 * size / seconds


def machine(device: str) -> dict[str, str]:
    """Return what ran: device and versions."""
    name = torch.cuda.get_device_name() if device != "cpu" else f"{platform.processor() or 'cpu'} (rehearsal)"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
