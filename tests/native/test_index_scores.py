"""Indexer scores and conversion between stores."""

from __future__ import annotations

import pytest
import torch
from coded import CodedStore
from paged import ISAS, Batch, workers
from test_codecs import same_bytes, write

from kvpool import _native


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "index-fp8", "index-fp4"])
def test_topk_names_the_slots_with_the_largest_scores(isa: str, codec: str) -> None:
    g = torch.Generator().manual_seed(7)
    batch = Batch([150, 0, 9, 2200], [20, 0, 1, 2], 16, 160)
    pool = workers(isa)
    store = CodedStore(codec, 160, 1, 16, (128,), "HND")
    for s, length in enumerate(batch.seq_lens):
        if length:
            write(pool, store, batch.slots_of(s), torch.randn(length, 1, 128, generator=g))
    batch.plan(2, 1)
    heads, topk = 7, 24
    q = torch.randn(23, heads, 128, generator=g)
    weights = torch.randn(23, heads, generator=g)
    got = torch.full((23, topk), 77, dtype=torch.int64)
    _native.score(
        pool, batch.view, store.native, q.data_ptr(), 0, *q.stride()[:2], heads, weights.data_ptr(), topk,
        got.data_ptr(),
    )  # fmt: skip
    for s in range(4):
        first, slots, seen = int(batch.cu_seqlens[s]), batch.slots_of(s), batch.visible(s)
        keys = store.decode(slots)[:, 0].double()
        for r in range(batch.num_rows[s]):
            products = torch.relu(q[first + r].double() @ keys.T)
            scores = (weights[first + r].double() @ products)[seen[r]]
            count = min(topk, len(scores))
            row = got[first + r]
            assert (row[count:] == -1).all()
            place = {int(slot): i for i, slot in enumerate(slots.tolist())}
            chosen = scores[[place[int(slot)] for slot in row[:count]]]
            want = scores.topk(count).values
            torch.testing.assert_close(chosen, want, atol=1e-4, rtol=1e-5)
            assert len(set(row[:count].tolist())) == count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("src", "dst"), [("bf16", "fp8"), ("fp8", "nvfp4-token"), ("nvfp4-token", "fp32"), ("int8", "int8")]
)
def test_conversion_stores_what_the_target_format_makes_of_the_decoded_values(isa: str, src: str, dst: str) -> None:
    pool = workers(isa)
    a = CodedStore(src, 10, 3, 4, (96,), "HND", smoothing=torch.rand(3, 96) + 0.5, rotation=True)
    b = CodedStore(dst, 5, 3, 16, (96,), "NHD")
    from_slots = torch.randperm(40)[:33]
    write(pool, a, from_slots, torch.randn(33, 3, 96))
    to_slots = torch.randperm(80)[:33]
    from_slots[4] = -1
    to_slots[9] = -1
    _native.convert(pool, a.native, from_slots.data_ptr(), b.native, to_slots.data_ptr(), 33)
    both = (from_slots >= 0) & (to_slots >= 0)
    want = b.encode(a.decode(from_slots[both]))
    for name, plane in b.at(to_slots[both]).items():
        assert same_bytes(plane, want[name])
