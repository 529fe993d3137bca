"""Native encoding and decoding equal the torch reference to the bit, on every instruction set this CPU has."""

from __future__ import annotations

import math

import pytest
import torch
from coded import CASES, CodedStore, mixing
from paged import DTYPES, ISAS, Batch, attend, exact, workers

from kvpool import _native
from kvpool.codecs import Counts

IDS = [f"{codec}-{'+'.join(map(str, segments))}" for codec, segments, _ in CASES]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; which of its NaNs a float type holds does not count (torch's own conversions differ there)."""
    if a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 1.0), b.masked_fill(nan, 1.0)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def write(pool: _native.Workers, store: CodedStore, slots: torch.Tensor, x: torch.Tensor) -> None:
    batch = Batch([len(slots)], [len(slots)], store.tokens_per_block, store.num_blocks)
    batch.slots[:] = slots
    batch.plan(1, store.num_heads)
    _native.write(pool, batch.view, store.native, x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.stride(1))


def read(pool: _native.Workers, store: CodedStore, slots: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(slots), store.num_heads, store.dim), 9.0)
    _native.read(pool, store.native, slots.data_ptr(), len(slots), out.data_ptr(), 0, out.stride(0), out.stride(1))
    return out


def hard_vectors(num_heads: int, dim: int, seed: int) -> torch.Tensor:
    """Vectors `[n, H, D]` of every kind section 7 of the design speaks of, ordinary ones among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40, num_heads, dim, generator=g)
    x[1] = 0.0
    x[2] = 3.25
    x[3] *= 1e-42
    x[4] *= 1e-38
    x[5] *= 3e37
    x[6, 0] = torch.finfo(torch.float32).max
    x[7, 0, 3] = math.nan
    x[8, -1, 5] = math.inf
    x[9, 0, 0] = -math.inf
    x[10] *= 60
    x[11] *= torch.logspace(-6, 4, dim)
    x[12] = -0.0
    x[13] = torch.randint(-300, 300, (num_heads, dim), generator=g) / 4.0
    x[14] *= 1e-30
    return x


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("codec", "segments", "scale"), CASES, ids=IDS)
def test_a_write_stores_the_reference_bytes_and_reads_back_the_reference_values(
    isa: str, layout: str, codec: str, segments: tuple[int, ...], scale: float | None
) -> None:
    store = CodedStore(codec, 12, 3, 4, segments, layout, scale)
    untouched = {name: plane.clone() for name, plane in store.planes.items()}
    pool = workers(isa)
    x = hard_vectors(3, store.dim, 5)
    slots = torch.randperm(48)[:40]
    write(pool, store, slots, x)
    counts = Counts()
    want = store.encode(x, counts)
    for name, plane in store.at(slots).items():
        assert same_bytes(plane, want[name]), name
    rest = torch.tensor(sorted(set(range(48)) - set(slots.tolist())))
    for name, plane in store.at(rest).items():
        assert same_bytes(plane, untouched[name][rest // 4, :, rest % 4]), f"{name}: wrote outside the slots"
    assert store.native.counters() == (counts.saturated, counts.flushed, counts.nonfinite)
    got, decoded = read(pool, store, slots), store.decode(slots)
    assert torch.equal(got.isnan(), decoded.isnan())
    assert torch.equal(got.nan_to_num(0.5), decoded.nan_to_num(0.5))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("codec", "scales"), [
    ("fp8-tensor", (1.0, 0.1, 2.0**-9, 3e4, 1.7 * 2.0**-60, 2.0**60, 1e-20, 1e20)),
    ("fp8e5m2-tensor", (1.0, 0.1, 2.0**-9, 3e4, 1.7 * 2.0**-60, 2.0**60, 1e-20, 1e20)),
    ("int8-tensor", (1.0, 0.1, 2.0**-9, 3e4, 1.7 * 2.0**-60, 2.0**60, 1e-20, 1e20)),
    ("nvfp4", (1.0, 1e-4, 1e4)),
    ("nvfp4-token", (None,)),
    ("index-fp4", (None,)),
    ("fp8", (None,)),
    ("int8", (None,)),
    ("fp16", (None,)),
])  # fmt: skip
def test_every_bf16_value_is_rounded_as_the_reference_rounds(
    isa: str, codec: str, scales: tuple[float | None, ...]
) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 1, 128)
    for scale in scales:
        store = CodedStore(codec, 32, 1, 16, (128,), "HND", scale)
        slots = torch.arange(512)
        write(workers(isa), store, slots, every)
        counts = Counts()
        want = store.encode(every, counts)
        for name, plane in store.at(slots).items():
            assert same_bytes(plane, want[name]), (name, scale)
        assert store.native.counters() == (counts.saturated, counts.flushed, counts.nonfinite), scale


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", [
    "fp8", "int8", "nvfp4", "nvfp4-token", "bf16", "fp8-tensor", "fp8e5m2-tensor", "int8-tensor",
])  # fmt: skip
@pytest.mark.parametrize(("layout", "dim"), [("HND", 192), ("NHD", 256), ("HND", 64)])
def test_bf16_rows_are_stored_as_the_reference_stores_them(isa: str, codec: str, layout: str, dim: int) -> None:
    heads = 2 if dim > 64 else 5  # the larger ones are many enough to go past the cache
    store = CodedStore(codec, 300, heads, 16, (dim,), layout, 0.013)
    x = torch.cat([hard_vectors(heads, dim, seed) for seed in range(100)]).bfloat16()
    slots = torch.randperm(4800)[:4000]
    write(workers(isa), store, slots, x)
    counts = Counts()
    want = store.encode(x, counts)
    for name, plane in store.at(slots).items():
        assert same_bytes(plane, want[name]), name
    assert store.native.counters() == (counts.saturated, counts.flushed, counts.nonfinite)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(1, 128, 8209), (5, 128, 1649), (2, 1024, 517)])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_appends_store_keys_and_values(
    isa: str, codec: str, heads: int, dim: int, tokens: int, threads: int
) -> None:
    k, v = (CodedStore(codec, tokens // 16 + 2, heads, 16, (dim,), "HND") for _ in range(2))
    x = torch.randn(2, tokens, heads, dim).bfloat16()
    slots = torch.randperm(tokens + 16)[:tokens]
    slots[::7] = -1
    batch = Batch([tokens], [tokens], 16, k.num_blocks)
    batch.slots[:] = slots
    batch.plan(1, heads)
    _native.write_kv(
        workers(isa, threads), batch.view, k.native, x[0].data_ptr(), x.stride(1), x.stride(2),
        v.native, x[1].data_ptr(), x.stride(1), x.stride(2), DTYPES[x.dtype],
    )  # fmt: skip
    kept = slots >= 0
    for store, part in zip((k, v), x, strict=True):
        want = store.encode(part[kept])
        for name, plane in store.at(slots[kept]).items():
            assert same_bytes(plane, want[name]), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["fp8", "int8", "nvfp4-token"])
@pytest.mark.parametrize("exponent", [2, 31, 33, 127, 254])
def test_every_mantissa_is_rounded_right_below_every_largest_element(isa: str, codec: str, exponent: int) -> None:
    # A row for each mantissa of its largest element and each octave below: all mantissas of that octave.
    tops = torch.arange(128) + exponent * 128
    octaves = torch.arange(min(exponent, 17) + 1)
    below = (exponent - octaves)[:, None] * 128 + torch.arange(128)
    rows = torch.minimum(below[None], tops[:, None, None])
    sign = torch.where(torch.arange(192) % 3 == 0, -32768, 0)
    bits = torch.cat([rows, tops[:, None, None].expand(-1, len(octaves), 64)], -1) + sign
    x = bits.view(-1, 1, 192).to(torch.int16).view(torch.bfloat16)
    store = CodedStore(codec, -(-len(x) // 16), 1, 16, (192,), "HND")
    slots = torch.arange(len(x))
    write(workers(isa), store, slots, x)
    want = store.encode(x)
    for name, plane in store.at(slots).items():
        assert same_bytes(plane, want[name]), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("codec", "scale"), [("nvfp4", 1.0), ("nvfp4", 0.013), ("nvfp4", 2.0**7), ("nvfp4", 0.75), ("nvfp4-token", None)]
)
def test_every_step_of_a_block_is_where_the_reference_has_it(isa: str, codec: str, scale: float | None) -> None:
    # Blocks for each mantissa of their largest element, with all elements of the six octaves below; the
    # scale 128 makes subnormal block scales. Shuffled, so that a vector's largest is not each of its blocks'.
    tops = torch.arange(128)[:, None, None] + 127 * 128
    below = (torch.arange(52 * 15) % 768).view(1, 52, 15)
    bits = torch.cat([tops - below, tops.expand(-1, 52, 1)], -1) + torch.where(torch.arange(16) % 3 == 0, -32768, 0)
    blocks = bits.view(-1, 16)[torch.randperm(128 * 52, generator=torch.Generator().manual_seed(3))]
    x = blocks.reshape(-1, 1, 64).to(torch.int16).view(torch.bfloat16)
    store = CodedStore(codec, -(-len(x) // 16), 1, 16, (64,), "HND", scale)
    slots = torch.arange(len(x))
    write(workers(isa), store, slots, x)
    want = store.encode(x)
    for name, plane in store.at(slots).items():
        assert same_bytes(plane, want[name]), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["fp8-tensor", "fp8e5m2-tensor", "int8-tensor"])
def test_all_256_codes_decode_to_the_format(isa: str, codec: str) -> None:
    store = CodedStore(codec, 1, 1, 2, (256,), "HND", 1.0)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    store.planes["data"][0, 0, 0] = codes.view(store.planes["data"].dtype)
    slots = torch.tensor([0])
    got, want = read(workers(isa), store, slots), store.decode(slots)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["fp8", "int8", "nvfp4-token", "bf16"])
@pytest.mark.parametrize("options", ["smoothing", "rotation", "smoothing rotation", "mixing", "mixing rotation"])
def test_maps_store_the_reference_bytes(isa: str, codec: str, options: str) -> None:
    smoothing = torch.rand(3, 96) * 3 + 0.1 if "smoothing" in options else None
    matrix = mixing(3, 96) if "mixing" in options else None
    store = CodedStore(codec, 12, 3, 4, (96,), "HND", None, smoothing, "rotation" in options, matrix)
    x = hard_vectors(3, 96, 6)
    slots = torch.randperm(48)[:40]
    write(workers(isa), store, slots, x)
    want = store.encode(x)
    for name, plane in store.at(slots).items():
        assert same_bytes(plane, want[name]), name
    got, decoded = read(workers(isa), store, slots), store.decode(slots)
    torch.testing.assert_close(got, decoded, rtol=0, atol=0, equal_nan=True)


PAIRS = [
    ("fp8", "fp8"), ("int8", "int8"), ("nvfp4", "nvfp4"), ("nvfp4-token", "nvfp4-token"), ("fp8-tensor", "fp8-tensor"),
    ("fp8e5m2-tensor", "int8-tensor"), ("fp8", "nvfp4"), ("bf16", "int8"), ("nvfp4-token", "fp32"),
    ("index-fp8", "index-fp4"), ("fp16", "fp16"),
]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("k_codec", "v_codec"), PAIRS, ids=[f"{k}+{v}" for k, v in PAIRS])
@pytest.mark.parametrize(("layout", "maps"), [("HND", "none"), ("NHD", "smoothing"), ("NHD", "mixing")])
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=["q32", "q16"])
def test_attention_reads_what_is_stored(
    isa: str, k_codec: str, v_codec: str, layout: str, maps: str, q_dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(3)
    heads, group = 2, 4
    dim, v_dim = (128, 64) if layout == "HND" else (96, 160)  # multiples of 64, and of 32 only
    batch = Batch([70, 130, 9], [1, 130, 2], 16, 30, seed=2)
    pool = workers(isa)
    smoothing = torch.rand(heads, dim, generator=g) * 3 + 0.1 if maps == "smoothing" else None
    matrix = mixing(heads, dim) if maps == "mixing" else None
    k_store = CodedStore(k_codec, 30, heads, 16, (dim,), layout, 0.013, smoothing, maps != "none", matrix)
    v_store = CodedStore(v_codec, 30, heads, 16, (v_dim,), layout, 0.021, None, maps != "none")
    for s, length in enumerate(batch.seq_lens):
        write(pool, k_store, batch.slots_of(s), torch.randn(length, heads, dim, generator=g))
        write(pool, v_store, batch.slots_of(s), torch.randn(length, heads, v_dim, generator=g))
    q = torch.randn(batch.num_tokens, heads * group, dim, generator=g).to(q_dtype)
    batch.plan(2, heads)
    attention = _native.Attention([k_store.native], v_store.native, v_dim, heads * group)
    out, lse = attend(pool, batch, attention, q, v_dim, scale=dim**-0.5, dtype=q_dtype)
    tolerance = 2e-5 if q_dtype == torch.float32 else 2e-2
    for s in range(3):
        rows = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        slots = batch.slots_of(s)
        want, want_lse = exact(q[rows], k_store.decode(slots), v_store.decode(slots), batch.visible(s), scale=dim**-0.5)
        torch.testing.assert_close(out[rows].double(), want, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[rows].double(), want_lse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "fp8e5m2-tensor", "int8", "nvfp4", "nvfp4-token"])
@pytest.mark.parametrize(("dim", "group", "layout"), [
    (32, 1, "HND"), (64, 8, "NHD"), (80, 3, "HND"), (96, 2, "NHD"), (112, 5, "HND"), (256, 4, "HND"), (160, 7, "NHD"),
])  # fmt: skip
def test_a_decode_step_reads_every_head_size_and_group(isa: str, codec: str, dim: int, group: int, layout: str) -> None:
    heads, n = 2, 16
    generator = torch.Generator().manual_seed(7)
    batch = Batch([150, 1, 63], [1, 1, 1], n, 20, seed=3)
    pool = workers(isa)
    k_store, v_store = (CodedStore(codec, 20, heads, n, (dim,), layout, scale) for scale in (0.013, 0.021))
    for s, length in enumerate(batch.seq_lens):
        for store in (k_store, v_store):
            write(pool, store, batch.slots_of(s), torch.randn(length, heads, dim, generator=generator))
    q = torch.randn(3, heads * group, dim, generator=generator).bfloat16()
    batch.plan(2, heads)
    attention = _native.Attention([k_store.native], v_store.native, dim, heads * group)
    out, lse = attend(pool, batch, attention, q, dim, scale=dim**-0.5, dtype=torch.bfloat16)
    for s in range(3):
        slots = batch.slots_of(s)
        want, want_lse = exact(
            q[s : s + 1], k_store.decode(slots), v_store.decode(slots), batch.visible(s), scale=dim**-0.5
        )
        torch.testing.assert_close(out[s : s + 1].double(), want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[s : s + 1].double(), want_lse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("codec", ["nvfp4-token", "fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_stored_nan_reaches_what_it_belongs_to_and_nothing_else(isa: str, part: str, codec: str, rows: int) -> None:
    """With two rows, only the second sees the token that holds it."""
    heads, dim, n = 2, 64, 16
    batch = Batch([70], [rows], n, 6)
    pool = workers(isa)
    stores = {name: CodedStore(codec, 6, heads, n, (dim,), "HND") for name in ("k", "v")}
    slots = batch.slots_of(0)
    token = 66 if rows == 1 else 69
    for name, store in stores.items():
        x = torch.randn(70, heads, dim)
        if name == part:
            x[token, 1, 20] = math.nan
        write(pool, store, slots, x)
    q = torch.randn(rows, 4, dim).bfloat16()
    batch.plan(1, heads)
    attention = _native.Attention([stores["k"].native], stores["v"].native, dim, 4)
    out, _ = attend(pool, batch, attention, q, dim, scale=0.1, dtype=torch.bfloat16)
    bad = stores[part].decode(slots)[token, 1].isnan()
    assert bad.sum() == (16 if codec == "nvfp4-token" else dim)
    assert out[:, :2].isfinite().all()
    assert out[: rows - 1].isfinite().all()
    assert torch.equal(out[-1, 2:].isnan(), (bad if part == "v" else torch.ones_like(bad)).expand(2, -1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "nvfp4-token"])
def test_a_nan_query_reaches_its_own_row(isa: str, codec: str) -> None:
    heads, dim, n = 2, 64, 16
    batch = Batch([70], [1], n, 6)
    pool = workers(isa)
    stores = [CodedStore(codec, 6, heads, n, (dim,), "HND") for _ in range(2)]
    for store in stores:
        write(pool, store, batch.slots_of(0), torch.randn(70, heads, dim))
    q = torch.randn(1, 4, dim).bfloat16()
    q[0, 1, 5] = math.nan
    batch.plan(1, heads)
    attention = _native.Attention([stores[0].native], stores[1].native, dim, 4)
    out, _ = attend(pool, batch, attention, q, dim, scale=0.1, dtype=torch.bfloat16)
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("codec", ["int8", "nvfp4", "nvfp4-token"])
def test_whole_numbers_keep_what_bf16_would_round(isa: str, group: int, factor: float, codec: str) -> None:
    """Whole numbers of 15 or 16 bits stand for queries and probabilities, where bf16 keeps 8."""
    heads, dim, n, length = 2, 128, 16, 500
    g = torch.Generator().manual_seed(6)
    batch = Batch([length], [1], n, 40)
    pool = workers(isa)
    stores = [CodedStore(codec, 40, heads, n, (dim,), "HND", 0.002) for _ in range(2)]
    slots = batch.slots_of(0)
    for store in stores:
        write(pool, store, slots, torch.randn(length, heads, dim, generator=g) * torch.rand(length, 1, 1, generator=g))
    q = torch.randn(1, heads * group, dim, generator=g)
    q[:, :, 7] *= 50  # one element far above the others
    q = (q * factor).bfloat16()
    batch.plan(1, heads)
    attention = _native.Attention([stores[0].native], stores[1].native, dim, heads * group)
    out, lse = attend(pool, batch, attention, q, dim, scale=dim**-0.5 / factor / 10, dtype=torch.float32)
    want, want_lse = exact(
        q, stores[0].decode(slots), stores[1].decode(slots), batch.visible(0), scale=dim**-0.5 / factor / 10
    )
    torch.testing.assert_close(out.double(), want, atol=3e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-5, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["int8", "nvfp4"])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_sums_of_whole_numbers_hold_the_longest_vectors_at_their_largest(isa: str, codec: str, group: int) -> None:
    dim, n = 1024, 16
    batch = Batch([70], [1], n, 6)
    pool = workers(isa)
    stores = [CodedStore(codec, 6, 1, n, (dim,), "HND", 1 / 2688) for _ in range(2)]
    for store in stores:
        write(pool, store, batch.slots_of(0), torch.full((70, 1, dim), -1.0))
    q = torch.full((1, group, dim), 3.0).bfloat16()
    batch.plan(1, 1)
    attention = _native.Attention([stores[0].native], stores[1].native, dim, group)
    out, lse = attend(pool, batch, attention, q, dim, scale=1 / dim, dtype=torch.float32)
    k, v = (store.decode(batch.slots_of(0)) for store in stores)
    want, want_lse = exact(q, k, v, batch.visible(0), scale=1 / dim)
    torch.testing.assert_close(out.double(), want, atol=3e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-5, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "nvfp4-token"])
@pytest.mark.parametrize("split", [False, True], ids=["joint", "split"])
def test_a_latent_with_all_options_is_key_and_value(isa: str, codec: str, split: bool) -> None:
    rank, rope, heads = 256, 64, 16
    batch = Batch([70, 90], [1, 5], 16, 30, seed=4)
    pool = workers(isa)
    smoothing = torch.rand(1, rank if split else rank + rope) + 0.5
    latent = (128, 128)
    store = CodedStore(codec, 30, 1, 16, latent if split else (*latent, rope), "HND", None, smoothing, True)
    ropes = CodedStore("bf16", 30, 1, 16, (rope,), "HND")
    for s, length in enumerate(batch.seq_lens):
        x = torch.randn(length, 1, rank + rope)
        write(pool, store, batch.slots_of(s), x[..., : store.dim])
        write(pool, ropes, batch.slots_of(s), x[..., rank:])
    q = torch.randn(batch.num_tokens, heads, rank + rope)
    batch.plan(2, 1)
    keys = [store.native, ropes.native] if split else [store.native]
    out, _ = attend(pool, batch, _native.Attention(keys, store.native, rank, heads), q, rank, scale=0.06)
    for s in range(2):
        rows = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        slots = batch.slots_of(s)
        k = store.decode(slots)
        want, _ = exact(
            q[rows],
            torch.cat([k, ropes.decode(slots)], -1) if split else k,
            k[..., :rank],
            batch.visible(s),
            scale=0.06,
        )
        torch.testing.assert_close(out[rows].double(), want, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "int8", "nvfp4-token"])
def test_block_ids_beyond_two_to_the_31_elements_address_their_own_memory(isa: str, codec: str) -> None:
    import mmap

    # Block stride and ids so large that a product in 32 bits would land elsewhere; only touched pages take memory.
    n, heads, dim, stride, ids = 16, 2, 64, 1 << 21, (1, 4097, 9001)
    size = stride * (max(ids) + 1)
    slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(slab, dtype=torch.uint8).data_ptr()
    small = CodedStore(codec, len(ids), heads, n, (dim,), "HND")
    from kvpool.backends.cpu import CODEC_IDS

    offset, places = 0, {}
    for name, plane in small.planes.items():
        item = plane.element_size()
        places[name] = (base + offset, stride, plane.stride(1) * item, plane.stride(2) * item)
        offset += 1 << 16
    assert stride * max(ids) > 2**33
    big = _native.Store(
        CODEC_IDS[codec], heads, [dim], n, max(ids) + 1, places["data"], places.get("scale"), places.get("block_scale")
    )
    pool = workers(isa)
    x = torch.randn(len(ids) * n, heads, dim)
    write(pool, small, torch.arange(len(ids) * n), x)
    far = torch.cat([torch.arange(i * n, (i + 1) * n) for i in ids])
    batch = Batch([len(far)], [len(far)], n, len(ids))
    batch.slots[:] = far
    batch.table[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    batch.plan(1, heads)
    _native.write(pool, batch.view, big, x.data_ptr(), 0, x.stride(0), x.stride(1))
    near = Batch([len(far)], [len(far)], n, len(ids))
    near.table[0, : len(ids)] = torch.arange(len(ids), dtype=torch.int32)
    near.plan(1, heads)
    q = torch.randn(len(far), heads, dim)
    here, _ = attend(pool, near, _native.Attention([small.native], small.native, dim, heads), q, dim, scale=0.1)
    there, _ = attend(pool, batch, _native.Attention([big], big, dim, heads), q, dim, scale=0.1)
    assert torch.equal(here, there)
