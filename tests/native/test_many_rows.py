"""Attention of bf16 queries with many rows to a KV head: packed panels and products of whole rows, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from coded import CodedStore
from paged import ISAS, Batch, PlainStore, attend, exact, workers
from test_attend import ragged, run
from test_codecs import write

from kvpool import _native

BF16 = torch.bfloat16


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [3, 12, 40])
@pytest.mark.parametrize(
    "lifetime", [{"window": 50}, {"window": 64, "sink_tokens": 4}, {"chunk": 48}, {"window": 1}], ids=str
)
def test_borders_of_windows_and_chunks_agree(isa: str, group: int, lifetime: dict[str, int]) -> None:
    for split, layout in ((0, "HND"), (64, "NHD")):
        run(isa, ragged(16, **lifetime), split_tokens=split, group=group, dtype=BF16, layout=layout)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [32, 80, 96, 100, 112, 192, 576])
def test_every_head_size_agrees(isa: str, dim: int) -> None:
    for group in (12, 36):
        run(isa, Batch([40, 77, 300], [1, 7, 2], 16, 40), dim=dim, v_dim=dim, group=group, dtype=BF16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [16, 128])
def test_softcap_sinks_and_splits_agree(isa: str, group: int) -> None:
    run(isa, ragged(16), softcap=5.0, group=group, dtype=BF16)
    run(isa, ragged(64), with_sinks=True, group=group, dtype=BF16)
    run(isa, ragged(2), with_sinks=True, softcap=2.0, split_tokens=64, group=group, dtype=BF16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 12, 40])
def test_a_nan_value_reaches_only_the_rows_that_see_it(isa: str, group: int) -> None:
    batch, pool = Batch([200], [200], 16, 15), workers(isa)
    k_store, v_store = (PlainStore(15, 1, 16, 64, BF16, "HND") for _ in range(2))
    k, v = torch.randn(200, 1, 64), torch.randn(200, 1, 64)
    v[17, 0, 5] = math.nan
    v[150] = math.inf
    batch.plan(2, 1)
    _native.write_kv(pool, batch.view, k_store.native, k.data_ptr(), 64, 64, v_store.native, v.data_ptr(), 64, 64, 0)
    q = torch.randn(200, group, 64).bfloat16()
    out, _ = attend(pool, batch, _native.Attention([k_store.native], v_store.native, 64, group), q, 64, scale=0.2)
    assert out[:17].isfinite().all()
    assert out[17:, :, 5].isnan().all()
    assert out[17:150, :, 6].isfinite().all()
    assert not out[150:, :, 6].isfinite().any()


LATENTS = {"bf16": BF16, "fp8": None, "int8": None, "nvfp4-token": None, "fp8-tensor": None}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", list(LATENTS))
@pytest.mark.parametrize("split", [False, True], ids=["joint", "split"])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_agree_in_every_format(isa: str, codec: str, split: bool, options: bool, heads: int) -> None:
    rank, rope = 256, 64
    batch, pool = Batch([70, 200], [1, 3], 16, 30, seed=4), workers(isa)
    latent = (128, 128)
    smoothing = torch.rand(1, rank if split else rank + rope) + 0.5 if options else None
    scale = 0.02 if codec == "fp8-tensor" else None
    store = CodedStore(codec, 30, 1, 16, latent if split else (*latent, rope), "HND", scale, smoothing, options)
    ropes = CodedStore("bf16", 30, 1, 16, (rope,), "HND")
    for s, length in enumerate(batch.seq_lens):
        x = torch.randn(length, 1, rank + rope) * torch.logspace(-1, 1, rank + rope)  # the segments' scales differ
        write(pool, store, batch.slots_of(s), x[..., : store.dim])
        write(pool, ropes, batch.slots_of(s), x[..., rank:])
    q = (torch.randn(batch.num_tokens, heads, rank + rope) * torch.logspace(1, -1, rank + rope) * 0.2).bfloat16()
    batch.plan(2, 1)
    keys = [store.native, ropes.native] if split else [store.native]
    attention = _native.Attention(keys, store.native, rank, heads)
    if isa == "avx512":
        assert attention.path(pool, 2) == "avx512-panels"
    out, lse = attend(pool, batch, attention, q, rank, scale=0.06)
    for s in range(2):
        rows = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        slots = batch.slots_of(s)
        k = store.decode(slots)
        whole = torch.cat([k, ropes.decode(slots)], -1) if split else k
        want, want_lse = exact(q[rows], whole, k[..., :rank], batch.visible(s), scale=0.06)
        error = (out[rows].double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < 5e-3
        torch.testing.assert_close(lse[rows].double(), want_lse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_sparse_indices_and_tree_masks_agree(isa: str) -> None:
    batch, pool = Batch([300, 40], [3, 2], 16, 30), workers(isa)
    store = PlainStore(30, 1, 16, 96, BF16, "NHD")
    indices = torch.full((5, 200), -1, dtype=torch.int64)
    for s in range(2):
        slots = batch.slots_of(s)
        store.tensor[slots // 16, :, slots % 16] = torch.randn(len(slots), 1, 96).bfloat16()
        for r in range(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])):
            indices[r, torch.randperm(200)[:37]] = slots[torch.randperm(len(slots))[:37]]
    attention = _native.Attention([store.native], store.native, 64, 24)
    q = torch.randn(5, 24, 96).bfloat16()
    batch.plan(2, 1, 32, 64)
    out, _ = attend(pool, batch, attention, q, 64, scale=0.1, indices=indices)
    tree = torch.tensor([[0b001], [0b011], [0b101], [0b01], [0b11]])
    tree_out, _ = attend(pool, batch, attention, q, 64, scale=0.1, tree=tree)
    for r in range(5):
        seen = store.rows(indices[r][indices[r] >= 0])
        want, _ = exact(q[r : r + 1], seen, seen[..., :64], torch.ones(1, len(seen), dtype=torch.bool), scale=0.1)
        torch.testing.assert_close(out[r : r + 1].double(), want, atol=8e-3, rtol=8e-3)
        s, rows = (0, 3) if r < 3 else (1, 2)
        row = r - int(batch.cu_seqlens[s])
        visible = torch.ones(1, batch.seq_lens[s], dtype=torch.bool)
        for j in range(rows):
            visible[0, batch.seq_lens[s] - rows + j] = bool(int(tree[r]) >> j & 1)
        held = store.rows(batch.slots_of(s))
        assert row < rows
        want, _ = exact(q[r : r + 1], held, held[..., :64], visible, scale=0.1)
        torch.testing.assert_close(tree_out[r : r + 1].double(), want, atol=8e-3, rtol=8e-3)


@pytest.mark.skipif("avx512" not in ISAS, reason="this CPU has no AVX-512")
@pytest.mark.parametrize(("codec", "rows", "dtype", "name"), [
    ("fp8", 1, 2, "avx512-few-rows"), ("bf16", 2, 2, "avx512-few-rows"), ("fp8", 3, 2, "avx512-panels"),
    ("nvfp4", 32, 2, "avx512-panels"), ("fp8", 1, 0, "avx512"), ("fp32", 1, 2, "avx512"),
])  # fmt: skip
def test_a_path_names_the_kernel_that_serves(codec: str, rows: int, dtype: int, name: str) -> None:
    store = CodedStore(codec, 4, 2, 16, (64,), "HND", 0.1)
    attention = _native.Attention([store.native], store.native, 64, 8)  # four query heads a KV head
    assert attention.path(workers("avx512"), dtype, rows) == name
