"""Attention on stored codes is as exact as the codes: nothing decoded is kept, and the kernel adds next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import kvpool as kv
from kvpool.codecs import CODECS, get_codec
from kvpool.kinds import KVKind, LayerSpec

H, Q, D, T = 2, 8, 128, 300


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64: `[T, Q, D]`."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(Q // H, 0), v.repeat_interleave(Q // H, 0)
    logits = q @ k.transpose(1, 2) * D**-0.5
    logits = logits.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    return (logits.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "smoothed-rotated"])
@pytest.mark.parametrize("codec", [n for n in CODECS if get_codec(n).quantised and not n.startswith("index-")])
def test_the_error_of_an_output_is_what_the_stored_error_explains(codec: str, options: bool, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, n, D, generator=generator) for n in (Q, H, H))
    plan = kv.make_plan(kv.CacheSpec((LayerSpec((KVKind(H, D),)),)), num_blocks=20, codec=codec, tokens_per_block=32)
    cache = kv.KVCache(plan, backend=backend)
    cache.calibrate({0: {"k": k, "v": v, "q": q}}, smoothing=options, rotation=options or None)
    sequence = cache.sequence(range(T))
    with cache.step([(sequence, T)]) as step:
        cache.write(0, step, k, v)
        out = cache.attend(0, step, q)
    exact = exact_attention(q, k, v)
    explained = (exact_attention(q, *cache.read(0, sequence)) - exact).norm()
    assert (out.double() - exact).norm() <= 1.2 * explained


MEASURE = """
import resource, torch, kvpool as kv
from kvpool.kinds import KVKind, LayerSpec
H, D, T = 4, 128, 16384
spec = kv.CacheSpec((LayerSpec((KVKind(H, D),)),), max_seq_len=T + 32)
x = torch.randn(2048, H, D)
for codec in ("fp8", "nvfp4-token"):
    plan = kv.make_plan(spec, num_blocks=T // 32 + 1, codec=codec, tokens_per_block=32, max_step_tokens=2048)
    cache = kv.KVCache(plan, backend="cpu")
    seq = cache.sequence(range(T))
    for begin in range(0, T, 2048):
        with cache.step([(seq, 2048)]) as step:
            cache.write(0, step, x, x)
    seq.extend([1])
    with cache.step([(seq, 1)]) as step:
        cache.write(0, step, x[:1], x[:1])
        q = torch.randn(1, 16, D)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = cache.attend(0, step, q)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert out.isfinite().all()
    print(after - before)
"""


def test_attention_keeps_no_decoded_copy_of_the_cache() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    decoded_kib = 2 * 4 * 128 * 16384 * 2 >> 10  # in bf16
    grown = [int(line) for line in done.stdout.split()]
    assert len(grown) == 2
    assert max(grown) < decoded_kib // 8, grown
