"""Faults of layouts where tensors come in and views go out, as other projects shipped them. Each names its report."""

from __future__ import annotations

import pytest
import torch

import kvpool as kv
from kvpool.errors import LayoutError
from kvpool.kinds import KVKind, LayerSpec
from kvpool.layout import LAYOUTS

BACKENDS = ("reference", "cpu")
H, D, T = 3, 36, 20


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(backend: str, layout: str = "HND", codec: str = "bf16", n: int = 4) -> kv.KVCache:
    spec = kv.CacheSpec((LayerSpec((KVKind(H, D),)),) * 2, "bf16", max_seq_len=256)
    return kv.KVCache(
        kv.make_plan(spec, codec=codec, layout=layout, tokens_per_block=n, num_blocks=16), backend=backend
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_has_the_sizes_of_the_spec_and_the_strides_of_the_layout(backend: str, layout: str) -> None:
    """LMCache pull request 2826: sizes were read by the axis order of another layout. Here H != N != D."""
    cache = make(backend, layout)
    k, v = normal(T, H, D).bfloat16(), normal(T, H, D, seed=1).bfloat16()
    sequence = cache.sequence(range(T))
    with cache.step([(sequence, T)]) as step:
        cache.write(1, step, k, v)
        slots = step.groups[0].slots.clone()
    view = cache.view(1, "kv")
    assert view.layout == layout
    assert view.data.shape == ((16, 2, H, 4, D) if layout == "HND" else (16, 2, 4, H, D))
    data = view.data if layout == "NHD" else view.data.transpose(2, 3)  # [B, F, N, H, C]
    for factor, x in enumerate((k, v)):
        assert torch.equal(data[slots // 4, factor, slots % 4], x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_has_one_size_in_every_table_and_view(backend: str) -> None:
    """vLLM pull request 27547: pages of the manager (64) and of the kernel (16) were mixed, and nothing said so."""
    cache = make(backend, n=64)
    sequence = cache.sequence(range(100))
    with cache.step([(sequence, 100)]) as step:
        indptr, indices, last = step.paged()
        table, slots = step.groups[0].block_table[0], step.groups[0].slots
        assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2], table[:2].tolist(), [36])
        assert (slots // 64).tolist() == [int(table[0])] * 64 + [int(table[1])] * 36
        assert cache.view(0, "kv").data.shape[3] == 64
    with pytest.raises(kv.PlanError, match="48"):
        make(backend, n=48)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_of_different_strides_are_each_read_by_their_own(backend: str, layout: str) -> None:
    """vllm-xpu-kernels pull request 449: the layout of K was applied to V."""
    k, v = normal(T, H, D), normal(T, H, D, seed=1)
    heads_first = v.transpose(0, 1).contiguous().transpose(0, 1)
    assert heads_first.stride() != k.stride()
    read = []
    for values in (v, heads_first):
        cache = make(backend, layout)
        sequence = cache.sequence(range(T))
        with cache.step([(sequence, T)]) as step:
            cache.write(0, step, k, values)
        read.append(cache.read(0, sequence))
    for a, b in zip(*read, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_in_another_order_of_axes_is_refused_and_writes_nothing(backend: str) -> None:
    """The same report: what cannot be told apart by strides is told apart by shape, before anything is written."""
    cache = make(backend)
    k = normal(T, H, D)
    sequence = cache.sequence(range(T))
    with cache.step([(sequence, T)]) as step:
        cache.write(0, step, k, k)
        before = [x.clone() for x in cache.read(0, sequence)]
        with pytest.raises(LayoutError, match=r"\[20, 3, 36\]"):
            cache.write(0, step, k + 1, k.transpose(0, 1))
        assert all(torch.equal(a, b) for a, b in zip(before, cache.read(0, sequence), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_into_a_view_is_in_the_pool(backend: str, layout: str) -> None:
    """vLLM pull request 52818: a transfer registered a contiguous copy, and what arrived was never read."""
    cache = make(backend, layout)
    sequence = cache.sequence(range(T))
    with cache.step([(sequence, T)]) as step:
        cache.write(0, step, normal(T, H, D), normal(T, H, D, seed=1))
    for factor in range(2):
        cache.view(0, "kv").data[:, factor] = 3.0 + factor
    slab = cache.pools.slabs[0]
    assert slab.address <= cache.view(0, "kv").data.data_ptr() < slab.address + slab.committed_bytes
    assert [x.unique().tolist() for x in cache.read(0, sequence)] == [[3.0], [4.0]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_between_planes_is_never_written(backend: str, codec: str, layout: str) -> None:
    """llama-cpp-turboquant issue 268: rows were packed over the padding of wider ones."""
    cache = make(backend, layout, codec, n=2)
    (group,) = cache.plan.groups
    assert group.bytes_per_block > group.payload_bytes_per_block, "no padding to spoil"
    slab = cache.pools.slabs[0]
    slab.bytes[: slab.committed_bytes].fill_(0xA5)
    for pool in group.pools:
        for plane in pool.planes:
            slab.plane(plane).zero_()
    padding = slab.bytes[: slab.committed_bytes] == 0xA5
    sequence = cache.sequence(range(T))
    with cache.step([(sequence, T)]) as step:
        for layer in range(2):
            cache.write(layer, step, normal(T, H, D), normal(T, H, D, seed=1))
    assert padding.any()
    assert (slab.bytes[: slab.committed_bytes][padding] == 0xA5).all()
