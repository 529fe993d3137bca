"""Attention kernels against float64, on every instruction set this CPU has."""

from __future__ import annotations

import math

import pytest
import torch
from paged import ISAS, Batch, PlainStore, attend, exact, workers

from kvpool import _native

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(
    isa: str,
    batch: Batch,
    *,
    heads: int = 2,
    group: int = 3,
    dim: int = 64,
    v_dim: int = 64,
    layout: str = "HND",
    dtype: torch.dtype = torch.float32,
    softcap: float = 0.0,
    with_sinks: bool = False,
    split_tokens: int = 0,
    threads: int = 2,
    rows_per_item: int = 32,
    drop_blocks: int = 0,
) -> torch.Tensor:
    """Write random keys and values by the kernel, attend, compare with float64 on what is stored."""
    g = torch.Generator().manual_seed(batch.seed + 1)
    pool = workers(isa, threads)
    n = batch.tokens_per_block
    k_store = PlainStore(batch.num_blocks, heads, n, dim, dtype, layout)
    v_store = PlainStore(batch.num_blocks, heads, n, v_dim, dtype, layout)
    q_dtype = dtype
    for s, length in enumerate(batch.seq_lens):
        slots = batch.slots_of(s)
        writer = Batch([length], [length], n, batch.num_blocks)
        writer.slots[:] = slots
        writer.plan(1, heads)
        k = torch.randn(length, heads, dim, generator=g, dtype=torch.float32)
        v = torch.randn(length, heads, v_dim, generator=g, dtype=torch.float32)
        _native.write_kv(
            pool,
            writer.view,
            k_store.native,
            k.data_ptr(),
            *k.stride()[:2],
            v_store.native,
            v.data_ptr(),
            *v.stride()[:2],
            0,
        )
        assert torch.equal(k_store.rows(slots), k.to(dtype))
        assert torch.equal(v_store.rows(slots), v.to(dtype))
    queries = heads * group
    q = torch.randn(max(batch.num_tokens, 1), queries, dim + 4, generator=g).to(q_dtype)[: batch.num_tokens, :, :dim]
    sinks = torch.randn(queries, generator=g) if with_sinks else None
    attention = _native.Attention([k_store.native], v_store.native, v_dim, queries)
    batch.plan(threads, heads, rows_per_item, split_tokens)
    scale = 1.3 / math.sqrt(dim)
    batch_slots = [batch.slots_of(s) for s in range(len(batch.seq_lens))]
    batch.table[:, :drop_blocks] = -1
    out, lse = attend(pool, batch, attention, q, v_dim, scale=scale, softcap=softcap, sinks=sinks, dtype=q_dtype)
    for s in range(len(batch.seq_lens)):
        rows = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        slots = batch_slots[s]
        want, want_lse = exact(
            q[rows],
            k_store.rows(slots),
            v_store.rows(slots),
            batch.visible(s),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        torch.testing.assert_close(out[rows].double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(lse[rows].double(), want_lse, atol=2e-5, rtol=1e-5)
    return out.clone()


RAGGED = [(1, 1), (67, 1), (0, 0), (130, 130), (5, 5), (200, 33), (96, 2)]


def ragged(n: int, **kwargs: int) -> Batch:
    return Batch([a for a, _ in RAGGED], [b for _, b in RAGGED], n, 300 if n < 16 else 80, **kwargs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_ragged_batch_agrees_with_float64_in_every_plain_format(isa: str, dtype: torch.dtype, layout: str) -> None:
    run(isa, ragged(16), dtype=dtype, layout=layout, dim=48, v_dim=80)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [2, 4, 16, 64, 128])
def test_every_block_size_agrees(isa: str, n: int) -> None:
    run(isa, ragged(n), group=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 16), (3, 2), (2, 5), (9, 1), (1, 128), (8, 4)])
def test_every_ratio_of_heads_agrees_in_both_layouts(isa: str, heads: int, group: int) -> None:
    for layout in ("HND", "NHD"):
        run(isa, ragged(32), heads=heads, group=group, dim=32, v_dim=32, layout=layout)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576])
def test_every_head_size_agrees(isa: str, dim: int) -> None:
    run(isa, Batch([40, 77], [3, 77], 16, 20), dim=dim, v_dim=dim, heads=2, group=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "lifetime", [{"window": 1}, {"window": 50}, {"window": 64, "sink_tokens": 4}, {"chunk": 48}, {"chunk": 64}], ids=str
)
def test_windows_chunks_and_sink_tokens_agree(isa: str, lifetime: dict[str, int]) -> None:
    for split in (0, 64):
        run(isa, ragged(16, **lifetime), split_tokens=split)


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_and_sinks_agree(isa: str) -> None:
    run(isa, ragged(16), softcap=5.0)
    run(isa, ragged(16), with_sinks=True)
    run(isa, ragged(16), with_sinks=True, softcap=2.0, split_tokens=64)


@pytest.mark.parametrize("isa", ISAS)
def test_splits_are_merged_and_do_not_depend_on_the_number_of_threads(isa: str) -> None:
    batch = [Batch([700, 30, 513], [1, 1, 2], 16, 90) for _ in range(3)]
    one = run(isa, batch[0], split_tokens=128, threads=1)
    three = run(isa, batch[1], split_tokens=128, threads=3)
    assert torch.equal(one, three)
    assert batch[0].view.cumulative_splits() == [0, 6, 6, 11]
    run(isa, batch[2], threads=2, rows_per_item=1)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_see_nothing_are_zero(isa: str) -> None:
    # A padded sequence: rows, but no tokens; and rows before the first position.
    run(isa, Batch([0, 40], [3, 2], 16, 8))
    run(isa, Batch([2, 40], [2, 2], 16, 8))


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_outside_the_window_may_be_missing(isa: str) -> None:
    whole = run(isa, Batch([300], [4], 16, 40, window=33))
    missing = run(isa, Batch([300], [4], 16, 40, window=33), drop_blocks=(300 - 4 - 33) // 16)
    assert torch.equal(whole, missing)


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_value_reaches_only_the_rows_that_see_it(isa: str) -> None:
    pool = workers(isa)
    batch = Batch([40], [40], 16, 5)
    k_store, v_store = (PlainStore(5, 1, 16, 32, torch.float32, "HND") for _ in range(2))
    k, v = torch.randn(40, 1, 32), torch.randn(40, 1, 32)
    v[17, 0, 5] = math.nan
    v[20] = math.inf
    batch.plan(2, 1)
    _native.write_kv(pool, batch.view, k_store.native, k.data_ptr(), 32, 32, v_store.native, v.data_ptr(), 32, 32, 0)
    q = torch.randn(40, 1, 32)
    out, _ = attend(pool, batch, _native.Attention([k_store.native], v_store.native, 32, 1), q, 32, scale=0.2)
    assert out[:17].isfinite().all()
    assert out[17:, 0, 5].isnan().all()
    assert out[17:20, 0, 6].isfinite().all()
    assert not out[20:, 0, 6].isfinite().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_between_sink_tokens_and_window_reaches_nobody(isa: str, dtype: torch.dtype) -> None:
    batch = Batch([60], [1], 64, 3, window=20, sink_tokens=4)
    stores = [PlainStore(3, 1, 64, 32, dtype, "HND") for _ in range(2)]  # memory starts as NaN
    slots = batch.slots_of(0)
    seen = batch.visible(0)[0]
    for store in stores:
        store.tensor[slots[seen] // 64, :, slots[seen] % 64] = torch.randn(int(seen.sum()), 1, 32).to(dtype)
    batch.plan(1, 1)
    attention = _native.Attention([stores[0].native], stores[1].native, 32, 2)
    q = torch.randn(1, 2, 32).to(dtype)
    out, _ = attend(workers(isa), batch, attention, q, 32, scale=0.2, dtype=dtype)
    k, v = (store.rows(slots[seen]) for store in stores)
    want, _ = exact(q, k, v, torch.ones(1, int(seen.sum()), dtype=torch.bool), scale=0.2)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("isa", ISAS)
def test_a_latent_is_read_as_key_and_as_value(isa: str) -> None:
    batch = ragged(16)
    pool = workers(isa)
    store = PlainStore(80, 1, 16, 96 + 32, torch.bfloat16, "HND")
    latent, rope = PlainStore(80, 1, 16, 96, torch.bfloat16, "HND"), PlainStore(80, 1, 16, 32, torch.bfloat16, "HND")
    for s in range(len(batch.seq_lens)):
        block, offset = batch.slots_of(s) // 16, batch.slots_of(s) % 16
        x = torch.randn(len(block), 1, 128).bfloat16()
        store.tensor[block, :, offset] = x
        latent.tensor[block, :, offset] = x[..., :96]
        rope.tensor[block, :, offset] = x[..., 96:]
    q = torch.randn(batch.num_tokens, 16, 128)
    batch.plan(2, 1)
    out, _ = attend(pool, batch, _native.Attention([store.native], store.native, 96, 16), q, 96, scale=0.1)
    split = _native.Attention([latent.native, rope.native], latent.native, 96, 16)
    apart, _ = attend(pool, batch, split, q, 96, scale=0.1)
    for s in range(len(batch.seq_lens)):
        rows = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        x = store.rows(batch.slots_of(s))
        want, _ = exact(q[rows], x, x[..., :96], batch.visible(s), scale=0.1)
        torch.testing.assert_close(out[rows].double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(apart[rows].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_sparse_indices_choose_what_a_row_sees(isa: str) -> None:
    batch = Batch([300, 40], [3, 2], 16, 30)
    pool = workers(isa)
    k_store, v_store = (PlainStore(30, 2, 16, 64, torch.float32, "NHD") for _ in range(2))
    indices = torch.full((5, 100), -1, dtype=torch.int64)
    for s in range(2):
        slots = batch.slots_of(s)
        k_store.tensor[slots // 16, :, slots % 16] = torch.randn(len(slots), 2, 64)
        v_store.tensor[slots // 16, :, slots % 16] = torch.randn(len(slots), 2, 64)
        for r in range(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])):
            chosen = slots[torch.randperm(len(slots))[:37]]
            indices[r, torch.randperm(100)[:37]] = chosen
    q = torch.randn(5, 4, 64)
    for split in (0, 64):
        batch.plan(2, 2, 32, split)
        attention = _native.Attention([k_store.native], v_store.native, 64, 4)
        out, lse = attend(pool, batch, attention, q, 64, scale=0.1, indices=indices)
        for r in range(5):
            slots = indices[r][indices[r] >= 0]
            want, want_lse = exact(
                q[r : r + 1], k_store.rows(slots), v_store.rows(slots), torch.ones(1, 37, dtype=torch.bool), scale=0.1
            )
            torch.testing.assert_close(out[r : r + 1].double(), want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[r : r + 1].double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_a_tree_mask_says_which_draft_rows_a_row_sees(isa: str) -> None:
    rows, length = 70, 200
    batch = Batch([length], [rows], 16, 15)
    pool = workers(isa)
    k_store, v_store = (PlainStore(15, 1, 16, 32, torch.float32, "HND") for _ in range(2))
    slots = batch.slots_of(0)
    k_store.tensor[slots // 16, :, slots % 16] = torch.randn(length, 1, 32)
    v_store.tensor[slots // 16, :, slots % 16] = torch.randn(length, 1, 32)
    named = (torch.rand(rows, rows) < 0.4).tril() | torch.eye(rows, dtype=torch.bool)
    tree = torch.zeros(rows, 2, dtype=torch.int64)
    for i in range(rows):
        for j in range(rows):
            if named[i, j]:
                tree[i, j // 64] |= -(1 << 63) if j % 64 == 63 else 1 << (j % 64)
    seen = torch.ones(rows, length, dtype=torch.bool)
    seen[:, length - rows :] = named
    q = torch.randn(rows, 2, 32)
    batch.plan(2, 1)
    out, _ = attend(
        pool, batch, _native.Attention([k_store.native], v_store.native, 32, 2), q, 32, scale=0.3, tree=tree
    )
    want, _ = exact(q, k_store.rows(slots), v_store.rows(slots), seen, scale=0.3)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
