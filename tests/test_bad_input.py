"""What a caller can get wrong at the public face: a clear error before any kernel follows an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec

T, Q, H, D = 20, 8, 2, 64


def make_cache(**settings: Any) -> kv.KVCache:
    spec = kv.CacheSpec((LayerSpec((KVKind(H, D),)),) * 2, dtype="bf16", max_seq_len=256)
    return kv.KVCache(kv.make_plan(spec, num_blocks=16, tokens_per_block=16, codec="fp8"), **settings)


class Scene:
    """A cache with an open step, and tensors that fit it."""

    def __init__(self) -> None:
        self.cache = make_cache()
        self.sequence = self.cache.sequence(range(T))
        self.step = self.cache.step([(self.sequence, T)])
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(T, Q, D, generator=generator)
        self.k = torch.randn(T, H, D, generator=generator)
        self.v = torch.randn(T, H, D, generator=generator)
        self.cache.write(0, self.step, self.k, self.v)


def slots(*ids: int) -> torch.Tensor:
    return torch.tensor(ids)


CALLS: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "a tensor on another device": (lambda s: s.cache.write(0, s.step, s.k.to("meta"), s.v), "tensor on cpu, got"),
    "a sparse tensor": (lambda s: s.cache.write(0, s.step, s.k.to_sparse(), s.v), "strided tensor"),
    "a list": (lambda s: s.cache.write(0, s.step, s.k.tolist(), s.v), "k must be a tensor, got list"),
    "a query as a list": (lambda s: s.cache.attend(0, s.step, s.q.tolist()), "q must be a tensor, got list"),
    "fp64": (lambda s: s.cache.write(0, s.step, s.k.double(), s.v), "float32, bfloat16 or float16"),
    "too few tokens": (lambda s: s.cache.write(0, s.step, s.k[1:], s.v), r"\[T, H, D\] = \[20, 2, 64\]"),
    "keys without values": (lambda s: s.cache.write(0, s.step, s.k), "give k and v"),
    "indexer keys behind values that fit": (
        lambda s: s.cache.write(0, s.step, s.k + 1, s.v + 1, index=s.k),
        "stores no indexer keys",
    ),
    "keys beside indexer keys, without values": (lambda s: s.cache.write(0, s.step, s.k, index=s.k), "give k and v"),
    "indexer keys": (lambda s: s.cache.write(0, s.step, s.k, s.v, index=s.k), "stores no indexer keys"),
    "a layer too far": (lambda s: s.cache.write(2, s.step, s.k, s.v), r"0\.\.1, got 2"),
    "a layer from the end": (lambda s: s.cache.attend(-1, s.step, s.q), r"0\.\.1, got -1"),
    "a layer by name": (lambda s: s.cache.attend("0", s.step, s.q), r"0\.\.1, got '0'"),
    "another cache's step, written": (lambda s: make_cache().write(0, s.step, s.k, s.v), "another cache"),
    "another cache's step, read": (lambda s: make_cache(backend="reference").attend(0, s.step, s.q), "another cache"),
    "another cache's sequence": (lambda s: make_cache().step([(s.sequence, 1)]), "another cache"),
    "another cache's sequence, sized": (lambda s: make_cache().fits([(s.sequence, 1)]), "another cache"),
    "a place on another device": (lambda s: s.cache.attend(0, s.step, s.q, out=s.q.to("meta")), "out must be"),
    "one place for all rows": (
        lambda s: s.cache.attend(0, s.step, s.q, out=torch.zeros(1, 1, D).expand(T, Q, D)),
        "a place for every row",
    ),
    "sinks as a list": (lambda s: s.cache.attend(0, s.step, s.q, sinks=[1.0] * Q), "sinks must be a tensor"),
    "sinks elsewhere": (lambda s: s.cache.attend(0, s.step, s.q, sinks=torch.ones(Q, device="meta")), "sinks must be"),
    "sinks a KV head": (lambda s: s.cache.attend(0, s.step, s.q, sinks=torch.ones(H)), r"\[Q\] = \[8\]"),
    "a scale of nan": (lambda s: s.cache.attend(0, s.step, s.q, scale=float("nan")), "scale must be finite"),
    "a negative softcap": (lambda s: s.cache.attend(0, s.step, s.q, softcap=-3.0), "softcap positive"),
    "indices of another order": (
        lambda s: s.cache.attend(0, s.step, s.q, indices=torch.zeros((4, T), dtype=torch.int64).T),
        "indices must be contiguous",
    ),
    "indices of 32 bits": (
        lambda s: s.cache.attend(0, s.step, s.q, indices=torch.zeros((T, 4), dtype=torch.int32)),
        "contiguous int64",
    ),
    "slots of 32 bits": (lambda s: s.cache.take(0, slots(1).int()), "contiguous int64"),
    "slots as a table": (lambda s: s.cache.take(0, slots(1, 2).view(2, 1)), "of 1 axes"),
    "slots outside the pool": (lambda s: s.cache.take(0, slots(10**9)), "outside the pool"),
    "values as integers": (lambda s: s.cache.take(0, slots(1), torch.int8), "dtype must be float32"),
    "a state that is none": (lambda s: s.cache.state_read(0, s.step, "conv"), "keeps no state 'conv'"),
    "too many samples": (lambda s: s.cache.extend(s.step, [1, 2]), "one token a sample: 1, got 2"),
    "a negative token": (lambda s: s.cache.sequence([-1]), "token id is negative"),
    "a negative limit": (lambda s: s.cache.sequence([1], max_cached_tokens=-1), "must not be negative, got -1"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_refused_by_name_and_harms_nothing(call: str) -> None:
    scene = Scene()
    before = scene.cache.attend(0, scene.step, scene.q)
    wrong, message = CALLS[call]
    with pytest.raises((kv.KVError, ValueError), match=message):
        wrong(scene)
    assert torch.equal(scene.cache.attend(0, scene.step, scene.q), before)
    scene.step.close()
    scene.cache.check()


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(kv.UnsupportedError, match="needs a GPU"):
        make_cache(device="cuda")
