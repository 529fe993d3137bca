"""Read, gather, block copies and slot moves: bytes and places."""

from __future__ import annotations

import pytest
import torch
from paged import DTYPES, ISAS, Batch, PlainStore, workers

from kvpool import _native


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather_lays_sequences_one_after_another(isa: str, layout: str, out_dtype: torch.dtype) -> None:
    batch = Batch([70, 0, 5, 33], [1, 0, 5, 3], 8, 30)
    store = PlainStore(30, 3, 8, 40, torch.bfloat16, layout)
    store.tensor.copy_(torch.randn(store.tensor.shape))
    batch.plan(2, 3)
    batch.table[0, 1] = -1
    starts = torch.tensor([3, 0, 0, 30], dtype=torch.int32)
    indptr = torch.tensor([0, 67, 67, 72], dtype=torch.int64)
    wide = torch.full((75, 4, 48), 7.0, dtype=out_dtype)
    _native.gather(
        workers(isa),
        batch.view,
        store.native,
        wide.data_ptr(),
        DTYPES[out_dtype],
        *wide.stride()[:2],
        indptr.data_ptr(),
        starts.data_ptr(),
    )
    out = wide[:, :3, :40]
    slots = torch.cat([batch.slots_of(s)[int(starts[s]) :] for s in range(4)])
    want = torch.where((slots >= 0)[:, None, None], store.rows(slots.clamp(min=0)).float(), 0.0)
    held = torch.arange(3, 70) // 8 != 1
    want[:67] = torch.where(held[:, None, None], want[:67], 0.0)
    assert torch.equal(out.float(), want)
    assert (wide[:, 3] == 7).all(), "wrote past the heads"
    assert (wide[:, :, 40:] == 7).all(), "wrote past the head size"


@pytest.mark.parametrize("isa", ISAS)
def test_read_takes_any_slots_and_gives_zeros_for_none(isa: str) -> None:
    store = PlainStore(9, 2, 4, 32, torch.float16, "HND")
    store.tensor.copy_(torch.randn(store.tensor.shape))
    slots = torch.tensor([35, -1, 0, 17, 17], dtype=torch.int64)
    out = torch.empty(5, 2, 32)
    _native.read(workers(isa), store.native, slots.data_ptr(), 5, out.data_ptr(), 0, 64, 32)
    assert torch.equal(out[[0, 2, 3, 4]], store.rows(slots[[0, 2, 3, 4]]).float())
    assert not out[1].any()


@pytest.mark.parametrize("isa", ISAS)
def test_writes_skip_minus_one_and_refuse_slots_outside_the_pool(isa: str) -> None:
    batch = Batch([6], [6], 4, 4)
    store = PlainStore(4, 2, 4, 32, torch.float32, "NHD")
    batch.slots[:] = torch.tensor([15, -1, 3, -1, 4, 5])
    batch.plan(1, 2)
    x = torch.randn(6, 2, 32)
    _native.write(workers(isa), batch.view, store.native, x.data_ptr(), 0, 64, 32)
    written = torch.tensor([0, 2, 4, 5])
    assert torch.equal(store.rows(batch.slots[written]), x[written])
    assert int(store.tensor.isnan().sum()) == (16 - 4) * 64
    batch.slots[1] = 16
    with pytest.raises(ValueError, match="slot 16 lies outside the pool of 16 slots"):
        _native.write(workers(isa), batch.view, store.native, x.data_ptr(), 0, 64, 32)


@pytest.mark.parametrize("num_bytes", [64, 4096 + 128, 300_000])
@pytest.mark.parametrize("pieces", [1, 3])
def test_block_copies_move_every_byte_and_no_other(num_bytes: int, pieces: int) -> None:
    blocks = 10
    src = torch.randint(0, 256, (pieces, blocks, num_bytes + 32), dtype=torch.uint8)
    dst = torch.zeros(pieces, blocks, num_bytes, dtype=torch.uint8)
    a, b = torch.tensor([3, 9, 0, 5], dtype=torch.int32), torch.tensor([0, 1, 8, 9], dtype=torch.int32)
    _native.copy_blocks(
        workers("generic"),
        src.data_ptr(),
        src.stride(1),
        src.stride(0),
        dst.data_ptr(),
        dst.stride(1),
        dst.stride(0),
        num_bytes,
        pieces,
        a.data_ptr(),
        b.data_ptr(),
        4,
    )
    want = torch.zeros_like(dst)
    want[:, b.long()] = src[:, a.long(), :num_bytes]
    assert torch.equal(dst, want)


def test_moves_copy_a_token_in_all_planes_in_order() -> None:
    hnd, nhd = (PlainStore(6, 3, 4, 8, torch.float32, layout) for layout in ("HND", "NHD"))
    scale = torch.randn(6, 3, 4)
    planes = []
    for store in (hnd, nhd):
        store.tensor.copy_(torch.randn(store.tensor.shape))
        planes.append(((store.tensor.data_ptr(), *(4 * s for s in store.tensor.stride()[:3])), 3, 32))
    planes.append(((scale.data_ptr(), *(4 * s for s in scale.stride())), 3, 4))
    tensors = (hnd.tensor, nhd.tensor, scale)
    before = [t.clone() for t in tensors]
    src, dst = torch.tensor([9, 11, 20, -1]), torch.tensor([8, 9, 10, 3])  # 9 is read before it is written
    _native.Mover(planes, 4)(workers("generic"), src.data_ptr(), dst.data_ptr(), 4)
    for tensor, old in zip(tensors, before, strict=True):
        want = old.clone()
        for s, d in [(9, 8), (11, 9), (20, 10)]:
            want[d // 4, :, d % 4] = old[s // 4, :, s % 4]
        assert torch.equal(tensor, want)


def test_refusals_name_the_value_and_the_rule() -> None:
    with pytest.raises(ValueError, match=r"isa must be 0\.\.\d on this CPU, got 9"):
        _native.Workers(1, 9)
    with pytest.raises(ValueError, match="tokens_per_block must be a power of two of at least 2, got 12"):
        _native.Store(0, 1, [32], 12, 4, (0, 0, 0, 0))
    with pytest.raises(ValueError, match="a power of two of at least 32 that divides the vector's segments, got 16"):
        _native.Store(3, 1, [80], 16, 4, (0, 0, 0, 0), rotation=True)
