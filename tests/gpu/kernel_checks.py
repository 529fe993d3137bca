"""Every kernel gives what the reference gives, in every format and for everything that may be asked of it."""

from __future__ import annotations

import torch
from compared import REFERENCE, attend, mirror, opened, scenes
from scene import KV

from kvpool.backends.triton import TritonBackend
from kvpool.codecs import CODECS
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, StateKind
from kvpool.layout import LAYOUTS
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec


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
        for codec in ("bf16", "fp8", "nvfp4") if device != "cpu" else ("fp8",):
            here, there = scenes(KVKind(2, dim), codec, device, torch.bfloat16)
            attend(here, there, ("k", "v"), dim, 10, f"{codec} head of {dim}")


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
