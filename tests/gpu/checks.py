"""What a GPU has to show: every check takes a device, and runs on `cpu` as a rehearsal in Triton's interpreter.

What is expected is computed on the CPU by the reference backend, over a copy of the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "triton")]

from scene import KV, Scene  # noqa: E402

from kvpool.backends.base import Attention  # noqa: E402
from kvpool.backends.reference import ReferenceBackend  # noqa: E402
from kvpool.backends.triton import TritonBackend  # noqa: E402
from kvpool.codecs import CODECS  # noqa: E402
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, StateKind  # noqa: E402
from kvpool.layout import LAYOUTS  # noqa: E402
from kvpool.plan import make_plan  # noqa: E402
from kvpool.pools import Pools  # noqa: E402
from kvpool.spec import CacheSpec  # noqa: E402
from kvpool.step import Step, StepBuffers  # noqa: E402
from kvpool.tiers.base import Entry, Identity, pack_tokens  # noqa: E402
from kvpool.tiers.host import HostTier  # noqa: E402
from kvpool.tiers.mover import DeviceMover, HostMover, mover_for  # noqa: E402

REFERENCE = ReferenceBackend()
#: Relative L2 error of outputs: bf16 operands give between 1e-3 and 1e-2.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 3e-3}
LARGE: Any = {"rows": (1, 1, 5, 130), "lengths": (1, 700, 2050, 300)}
SMALL: Any = {"rows": (1, 3), "lengths": (9, 20)}


def scenes(kind: Any, codec: Any, device: str, dtype: torch.dtype, **changes: Any) -> tuple[Scene, Scene]:
    """The same cache twice: on the CPU, and on the device with the same bytes."""
    shape = LARGE if device != "cpu" else SMALL
    given = {"tokens_per_block": 16, "dtype": dtype, **shape, **changes}
    here, there = Scene(kind, codec, **given), Scene(kind, codec, device=device, **given)
    return here, there


def mirror(here: Scene, there: Scene) -> None:
    for a, b in zip(here.pools.slabs, there.pools.slabs, strict=True):
        size = min(a.committed_bytes, b.committed_bytes)
        b.bytes[:size].copy_(a.bytes[:size])


def opened(scene: Scene) -> TritonBackend:
    backend = TritonBackend(scene.device)
    backend.prepare(scene.pools, scene.step.buffers)
    backend.begin(scene.step)
    return backend


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    got, want = got.cpu().double(), want.double()
    assert got.isfinite().all(), f"{what}: not finite"
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def attend(here: Scene, there: Scene, names: tuple[str, ...], v_dim: int, heads: int, what: str, **asked: Any) -> None:
    """Fill one scene, mirror it, attend in both."""
    parts = here.filled(*names)
    others = there.parts(*names)
    mirror(here, there)
    k, v = ((parts[0],), parts[1]) if names == ("k", "v") else (parts, parts[0])
    other_k, other_v = ((others[0],), others[1]) if names == ("k", "v") else (others, others[0])
    dim = sum(part.vector.dim for part in k)
    q = here.normal(here.step.total_tokens, heads, dim)
    want = torch.empty(*q.shape[:2], v_dim)
    got = torch.full(want.shape, float("nan"), dtype=here.dtype, device=there.device)
    want_lse = torch.empty(want.shape[:2])
    got_lse = torch.empty(want.shape[:2], device=there.device)
    on_device = {k: x.to(there.device) if isinstance(x, torch.Tensor) else x for k, x in asked.items()}
    REFERENCE.attend(q, k, v, v_dim, here.step, Attention(dim**-0.5, here.lifetime, **asked), want, want_lse)
    backend = opened(there)
    options = Attention(dim**-0.5, here.lifetime, **on_device)
    backend.attend(q.to(there.device), other_k, other_v, v_dim, there.step, options, got, got_lse)
    close(got, want, here.dtype, what)
    assert (got_lse.cpu() - want_lse).abs().max() < 2e-2, f"{what}: log-sum-exp"


def formats(device: str) -> None:
    """Every codec writes the reference's bytes and reads them back, in both layouts."""
    for codec in CODECS if device != "cpu" else ("bf16", "fp8"):
        for layout in LAYOUTS:
            index = codec.startswith("index")
            kind, stored, name = ((KV, IndexerKind(128)), {"index": codec}, "index") if index else (KV, codec, "k")
            here, there = scenes(kind, stored, device, torch.bfloat16, layout=layout)
            (part,), (other,) = here.parts(name), there.parts(name)
            x = here.normal(here.step.total_tokens, part.num_heads, part.vector.dim)
            x[0, 0, 3] = float("inf")
            x[1] = 0
            REFERENCE.write((part,), (x,), here.step)
            backend = opened(there)
            backend.write((other,), (x.to(device),), there.step)
            for plane in part.planes:
                a, b = part.planes[plane].tensor, other.planes[plane].tensor.cpu()
                slots = here.step.groups[0].slots
                n = part.tokens_per_block
                a, b = a[slots // n, :, slots % n], b[slots // n, :, slots % n]
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), f"{codec} {layout}: bytes of {plane}"
            got = torch.empty(x.shape, dtype=torch.float32, device=device)
            want = torch.empty(x.shape)
            backend.read(other, there.step.groups[0].slots, got)
            REFERENCE.read(part, here.step.groups[0].slots, want)
            assert torch.equal(got.cpu().nan_to_num(7), want.nan_to_num(7)), f"{codec} {layout}: read"
            assert backend.counts(other) == part.constants.counts, f"{codec}: counts"


def attention(device: str, codecs: tuple[str, ...] = ("bf16", "nvfp4")) -> None:
    """Codecs in both layouts, decode rows and prefill rows in one batch."""
    for codec in codecs:
        for layout in LAYOUTS if device != "cpu" else ("NHD",):
            here, there = scenes(KVKind(2, 128), codec, device, torch.bfloat16, layout=layout)
            attend(here, there, ("k", "v"), 128, 16, f"decode and prefill {codec} {layout}")


def heads(device: str) -> None:
    """Other query types and head sizes."""
    for dtype in (torch.float16, torch.float32) if device != "cpu" else ():
        for codec in ("fp16", "fp32", "fp8", "nvfp4"):
            here, there = scenes(KVKind(2, 128), codec, device, dtype)
            attend(here, there, ("k", "v"), 128, 8, f"{codec} with {dtype}")
    for dim in (32, 80, 96, 192, 256) if device != "cpu" else (80,):
        here, there = scenes(KVKind(2, dim), "bf16", device, torch.bfloat16)
        attend(here, there, ("k", "v"), dim, 10, f"head of {dim}")


def options(device: str) -> None:
    """Windows, chunks, sink tokens, sinks, softcap, trees."""
    for lifetime in (Lifetime(window=100), Lifetime(window=100, sink_tokens=4), Lifetime(chunk=64)):
        here, there = scenes(KVKind(2, 128), "fp8", device, torch.bfloat16, lifetime=lifetime)
        attend(here, there, ("k", "v"), 128, 8, lifetime.name)
    here, there = scenes(KVKind(2, 128), "bf16", device, torch.bfloat16)
    attend(here, there, ("k", "v"), 128, 8, "sinks and softcap", sinks=torch.linspace(-3, 5, 8), softcap=20.0)
    here, there = scenes(KVKind(2, 128), "bf16", device, torch.bfloat16)
    rows = here.step.total_tokens
    tree = torch.randint(-(2**62), 2**62, (rows, 3), generator=here.random)
    own = torch.cat([torch.arange(n) for n in here.rows])
    tree[torch.arange(rows), own // 64] |= torch.tensor(1) << (own % 64)
    attend(here, there, ("k", "v"), 128, 8, "tree", tree=tree)


def latents(device: str, num_heads: int = 4) -> None:
    """MLA, one codec or two."""
    for codec in ("bf16", "fp8", "int8", "nvfp4", {"latent": "fp8", "rope": "bf16"}) if device != "cpu" else ("fp8",):
        here, there = scenes(LatentKind(512, 64), codec, device, torch.bfloat16, tokens_per_block=64)
        names = ("latent", "rope") if isinstance(codec, dict) else ("latent",)
        attend(here, there, names, 512, num_heads, f"latent {codec} {num_heads} heads")


def sparse(device: str) -> None:
    """Rows see the slots they are given."""
    mla = LatentKind(512, 64)
    here, there = scenes(mla, "fp8", device, torch.bfloat16, tokens_per_block=64)
    rows = here.step.total_tokens
    indices = torch.full((rows, 64), -1)
    row = 0
    for s, (new, length) in enumerate(zip(here.rows, here.lengths, strict=True)):
        for position in range(length - new, length):
            chosen = torch.randperm(position + 1, generator=here.random)[:64]
            indices[row, : len(chosen)] = torch.tensor([here.slot(s, int(p)) for p in chosen])
            row += 1
    attend(here, there, ("latent",), 512, 16, "sparse latent", indices=indices)


def indexer(device: str) -> None:
    """The indexer's best tokens, as a set: near ties may fall either way in bf16."""
    for codec in ("index-fp8", "index-fp4"):
        stored = {"latent": "bf16", "rope": "bf16", "index": codec}
        here, there = scenes((LatentKind(512, 64), IndexerKind(128)), stored, device, torch.bfloat16)
        (part,), (other,) = here.filled("index"), there.parts("index")
        mirror(here, there)
        rows, topk = here.step.total_tokens, 16
        q = here.normal(rows, 64, 128)
        weights = torch.randn(rows, 64, generator=here.random).abs()
        want, got = (torch.empty(rows, topk, dtype=torch.int64, device=d) for d in ("cpu", device))
        REFERENCE.score(q, weights, part, here.step, FULL, want)
        opened(there).score(q.to(device), weights.to(device), other, there.step, FULL, got)
        same = [len(set(a) & set(b)) / len(set(a)) for a, b in zip(want.tolist(), got.tolist(), strict=True)]
        assert min(same) >= 0.7, f"{codec}: {min(same):.2f} of a row's best tokens"
        assert sum(same) / len(same) >= 0.97, f"{codec}: {sum(same) / len(same):.3f} of all"


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


def states(device: str) -> None:
    """Recurrent states are stored, read and copied to the bit."""
    for codec in ("fp32", "bf16", "int8") if device != "cpu" else ("int8",):
        spec = CacheSpec((LayerSpec((StateKind("ssm", (16, 64, 128)),)),) * 2, max_seq_len=64)
        plan = make_plan(spec, codec={"ssm": codec}, num_blocks=24)
        here, there = Pools(plan), Pools(plan, device)
        part, other = here.part(1, "ssm"), there.part(1, "ssm")
        slots = torch.tensor([20, 3, -1, 7], dtype=torch.int32)
        x = torch.randn(4, part.vector.dim, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        backend = TritonBackend(device)
        REFERENCE.write_states(part, slots, x)
        backend.write_states(other, slots.to(device), x.to(device))
        REFERENCE.copy(here, 0, [(20, 21), (3, 4)])
        backend.copy(there, 0, [(20, 21), (3, 4)])
        wanted = torch.tensor([20, 3, -1, 7, 21, 4], dtype=torch.int32)
        want, got = REFERENCE.read_states(part, wanted), backend.read_states(other, wanted.to(device))
        assert torch.equal(got.cpu(), want), codec


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


CHECKS: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        formats,
        attention,
        heads,
        options,
        latents,
        sparse,
        indexer,
        states,
        high_ids,
        memory,
        tiers,
        graphs,
        steps_in_flight,
    )
}
#: On a GPU the longest are cut, so that their kernels are compiled by several processes at once.
GPU_CHECKS: dict[str, Callable[[str], None]] = {
    **{name: check for name, check in CHECKS.items() if name not in ("attention", "latents")},
    **{f"attention_{codec}": partial(attention, codecs=(codec,)) for codec in CODECS if not codec.startswith("index")},
    **{f"latents_{n}": partial(latents, num_heads=n) for n in (16, 128)},
}
