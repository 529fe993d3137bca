"""KVCache: what is written is what is read, for every codec, layout and kind, on every backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool as kv
from kvpool.codecs import CODECS
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, StateKind

H, D, N, Q = 3, 64, 16, 6  # H != N != D
KV_CODECS = [name for name in CODECS if not name.startswith("index-")]


def make_cache(kinds, *, backend="cpu", layout="HND", codec="fp32", lifetime=None, **settings) -> kv.KVCache:
    layers = tuple(LayerSpec(kinds, *([lifetime] if lifetime else [])) for _ in range(2))
    spec = kv.CacheSpec(layers, dtype="fp32", max_seq_len=512)
    settings = {"num_blocks": 64, "tokens_per_block": N, "max_sequences": 8, "max_step_tokens": 256, **settings}
    plan = kv.make_plan(spec, codec=codec, layout=layout, **settings)
    cache = kv.KVCache(plan, backend=backend)
    for slab in cache.pools.slabs:  # what nobody wrote must never reach an output
        for block in range(slab.num_blocks):
            for piece in slab.block_bytes(block):
                piece.fill_(0xFF)
    return cache


def fragment(cache: kv.KVCache) -> None:
    """Leave free blocks in an order of their own, so that tables are permuted."""
    sequences = [cache.sequence([1000 + i] * 33) for i in range(6)]
    with cache.step([(seq, 33) for seq in sequences]):
        pass
    for index in (3, 0, 5, 1):
        sequences[index].release(keep=False)


def set_constants(cache: kv.KVCache, options: bool) -> None:
    """k_scale != v_scale != 1; smoothing and rotation where the codec takes them."""
    for layer in range(2):
        parts = {part: c for (at, part), c in cache.pools.constants.items() if at == layer}
        for number, (part, constants) in enumerate(sorted(parts.items())):
            if constants.needs_scale:
                constants.set(scale=0.013 * (1 + number))
            if options and constants.quantised:
                constants.set(rotation=True)
                if part in ("k", "latent"):
                    shape = (cache.pools.part(layer, part).num_heads, cache.pools.part(layer, part).vector.dim)
                    constants.set(smoothing=torch.rand(shape) + 0.5)


def drive(cache: kv.KVCache, *, seed: int = 0, kind: str = "kv"):
    """A ragged prefill in two chunks, then decode; returns all attention outputs and what is read back."""
    torch.manual_seed(seed)
    fragment(cache)
    lengths = (40, 17, 70)
    dims = {"kv": (D, D), "wide": (D, 32), "mla": (64 + 32, 64)}[kind]
    content = [torch.randn(n + 5, H if kind != "mla" else 1, dims[0]) for n in lengths]
    values = [torch.randn(n + 5, H, dims[1]) for n in lengths]
    queries = [torch.randn(n + 5, Q, dims[0]) for n in lengths]
    sequences = [cache.sequence([i * 100 + j for j in range(n)]) for i, n in enumerate(lengths)]
    outputs = []
    for most in (25, 100, 1, 1, 1):
        with cache.step([(seq, most) for seq in sequences]) as step:
            spans = []
            for s, count in zip(step.sequences, step.num_tokens.tolist(), strict=True):
                index = [seq.id for seq in sequences].index(s)
                first = sequences[index].num_computed_tokens
                spans.append((index, slice(first, first + count)))
            k = torch.cat([content[i][span] for i, span in spans])
            q = torch.cat([queries[i][span] for i, span in spans])
            if kind == "mla":
                cache.write(1, step, latent=k[..., :64], rope=k[..., 64:])
            else:
                cache.write(1, step, k, torch.cat([values[i][span] for i, span in spans]))
            out, lse = cache.attend(1, step, q, scale=0.2, return_lse=True)
            outputs += [out, lse]
        cache.extend(step, [5] * step.num_samples)
    return outputs, [cache.read(1, seq) for seq in sequences], (content, values)


@pytest.mark.parametrize("codec", KV_CODECS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "smoothed-rotated"])
def test_native_and_reference_agree(codec, layout, options):
    results = []
    for backend in ("reference", "cpu"):
        cache = make_cache((KVKind(H, D),), backend=backend, layout=layout, codec=codec)
        torch.manual_seed(3)
        set_constants(cache, options)
        results.append(drive(cache))
    (want, want_read, _), (got, got_read, _) = results
    for a, b in zip(want, got, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    for a, b in zip(itertools.chain(*want_read), itertools.chain(*got_read), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("codec", KV_CODECS)
def test_layouts_give_the_same_bits(codec, backend):
    runs = []
    for layout in ("HND", "NHD"):
        cache = make_cache((KVKind(H, D),), backend=backend, layout=layout, codec=codec)
        set_constants(cache, False)
        runs.append(drive(cache))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(itertools.chain(*runs[0][1]), itertools.chain(*runs[1][1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("kinds", "kind", "codec"),
    [
        ((KVKind(H, D, 32),), "wide", "fp32"),
        ((KVKind(H, D, 32),), "wide", {"k": "fp8", "v": "int8"}),
        ((KVKind(H, D),), "kv", {"k": "int8", "v": "nvfp4-token"}),
        ((KVKind(H, D),), "kv", {"*": "fp8", "layers": {-1: "bf16"}}),
        ((LatentKind(64, 32),), "mla", "fp32"),
        ((LatentKind(64, 32),), "mla", "fp8"),
        ((LatentKind(64, 32),), "mla", {"latent": "int8", "rope": "bf16"}),
    ],
)
def test_kinds_and_mixed_codecs_agree_with_the_reference(kinds, kind, codec, layout):
    runs = [drive(make_cache(kinds, backend=b, layout=layout, codec=codec), kind=kind) for b in ("reference", "cpu")]
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "lifetime", [Lifetime(window=24), Lifetime(window=7), Lifetime(chunk=20)], ids=lambda x: x.name
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_windows_and_chunks_see_what_they_say(lifetime, backend):
    cache = make_cache((KVKind(H, D),), backend=backend, lifetime=lifetime)
    torch.manual_seed(0)
    length = 60
    k, v, q = torch.randn(length, H, D), torch.randn(length, H, D), torch.randn(length, Q, D)
    sequence = cache.sequence(list(range(length)))
    outputs = []
    for most in (33, 100):
        first = sequence.num_computed_tokens
        with cache.step([(sequence, most)]) as step:
            span = slice(first, first + step.total_tokens)
            cache.write(0, step, k[span], v[span])
            outputs.append(cache.attend(0, step, q[span]))
    position = torch.arange(length)
    seen = position[None] <= position[:, None]
    if lifetime.window:
        seen &= position[None] > position[:, None] - lifetime.window
    else:
        seen &= position[None] // lifetime.chunk == position[:, None] // lifetime.chunk
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=seen, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(torch.cat(outputs), want, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), layout=st.sampled_from(["HND", "NHD"]), codec=st.sampled_from(["fp32", "int8", "nvfp4-token"]))
def test_any_split_of_a_ragged_write_equals_token_by_token_writing(data, layout, codec):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    torch.manual_seed(0)
    content = [(torch.randn(n, H, D), torch.randn(n, H, D)) for n in lengths]

    def write_all(chunks) -> list:
        cache = make_cache((KVKind(H, D),), layout=layout, codec=codec)
        sequences = [cache.sequence([i * 50 + j for j in range(n)]) for i, n in enumerate(lengths)]
        while any(s.num_computed_tokens < len(s) for s in sequences):
            first = {s.id: s.num_computed_tokens for s in sequences}
            with cache.step([(s, chunks()) for s in sequences]) as step:
                rows = [
                    (next(i for i, s in enumerate(sequences) if s.id == at), slice(first[at], first[at] + n))
                    for at, n in zip(step.sequences, step.num_tokens.tolist(), strict=True)
                ]
                cache.write(0, step, *(torch.cat([content[i][p][span] for i, span in rows]) for p in (0, 1)))
        return [cache.read(0, s) for s in sequences]

    once = write_all(lambda: 1)
    split = write_all(lambda: data.draw(st.integers(1, 40)))
    for a, b in zip(itertools.chain(*once), itertools.chain(*split), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_view_of_some_heads_shows_what_was_written(layout):
    cache = make_cache((KVKind(H, D),), layout=layout)
    k, v = torch.randn(20, H, D), torch.randn(20, H, D)
    sequence = cache.sequence(list(range(20)))
    with cache.step([(sequence, 20)]) as step:
        cache.write(1, step, k, v)
        table = step.groups[0].block_table[0]
    view = cache.view(1, "kv", heads=slice(1, 3))
    data = view.data if layout == "HND" else view.data.transpose(2, 3)  # [B, F, H, N, C]
    assert data.shape[1:] == (2, 2, N, D)
    for factor, written in enumerate((k, v)):
        assert torch.equal(data[table[0], factor], written[:16, 1:3].transpose(0, 1))
        assert torch.equal(data[table[1], factor, :, :4], written[16:, 1:3].transpose(0, 1))
    assert view.data.data_ptr() - cache.pools.slabs[0].address < cache.plan.groups[0].bytes_per_block


def test_with_as_many_heads_as_tokens_only_the_declaration_decides():
    """H == N: shapes cannot tell the layouts apart; strides do, and a wrong tensor is refused by name."""
    caches = {layout: make_cache((KVKind(N, D),), layout=layout) for layout in ("HND", "NHD")}
    k = torch.randn(N, N, D)
    for layout, cache in caches.items():
        with cache.step([(cache.sequence(list(range(N))), N)]) as step:
            cache.write(0, step, k, -k)
            block = int(step.groups[0].block_table[0, 0])
        stored = cache.view(0, "kv").data[block, 0]
        assert torch.equal(stored, k.transpose(0, 1) if layout == "HND" else k)


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (torch.zeros(4, D, H), r"\[T, H, D\] = \[4, 3, 64\], got \[4, 64, 3\]"),
        (torch.zeros(3, H, D), r"got \[3, 3, 64\]"),
        (torch.zeros(4, H, D, dtype=torch.int32), "torch.int32"),
        (torch.zeros(4, D, H).transpose(1, 2), "contiguous on its last axis"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_before_anything_is_written(k, message):
    cache = make_cache((KVKind(H, D),))
    before = cache.pools.slabs[0].block_bytes(0)[0].clone()
    with cache.step([(cache.sequence([1, 2, 3, 4]), 4)]) as step:
        with pytest.raises(kv.LayoutError, match=message):
            cache.write(0, step, k, torch.zeros(4, H, D))
        with pytest.raises(kv.LayoutError, match=message):
            cache.write(0, step, torch.zeros(4, H, D), k)
    assert torch.equal(cache.pools.slabs[0].block_bytes(0)[0], before)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_states_are_read_from_the_last_step_and_written_to_a_fresh_slot(codec):
    kinds = (KVKind(H, D), StateKind("ssm", (4, 8)))
    cache = make_cache(kinds, codec={"*": "fp32", "ssm": codec}, num_blocks={"full": 64, "state": 8})
    sequence = cache.sequence([1, 2, 3])
    first, second = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    with cache.step([(sequence, 3)]) as step:
        assert (cache.state_read(1, step, "ssm") == 0).all()
        cache.state_write(1, step, "ssm", first)
    sequence.extend([4])
    with pytest.raises(ZeroDivisionError), cache.step([(sequence, 1)]) as step:  # noqa: PT012
        cache.state_write(1, step, "ssm", second)
        raise ZeroDivisionError
    with cache.step([(sequence, 1)]) as step:
        torch.testing.assert_close(cache.state_read(1, step, "ssm"), first, rtol=0.02, atol=0.02)
    assert cache.plan.groups[1].is_state


def test_indexer_keys_pick_the_same_slots_on_every_backend():
    picked = []
    for backend in ("reference", "cpu"):
        cache = make_cache((LatentKind(64, 32), IndexerKind(32, 32)), backend=backend)
        torch.manual_seed(0)
        sequence = cache.sequence(list(range(40)))
        with cache.step([(sequence, 40)]) as step:
            cache.write(
                0, step, latent=torch.randn(40, 1, 64), rope=torch.randn(40, 1, 32), index=torch.randn(40, 1, 32)
            )
            chosen = cache.score(0, step, torch.randn(40, 4, 32), torch.rand(40, 4), 8)
            out = cache.attend(0, step, torch.randn(40, Q, 96), indices=chosen)
        picked.append((chosen.sort(1).values, out))
    assert torch.equal(picked[0][0], picked[1][0])
    torch.testing.assert_close(picked[0][1], picked[1][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_row_that_sees_nothing_gives_zeros_and_minus_infinity_even_with_sinks(backend):
    cache = make_cache((KVKind(H, D),), backend=backend)
    with cache.step([(cache.sequence([1, 2, 3]), 3)]) as step:
        cache.write(0, step, torch.randn(3, H, D), torch.randn(3, H, D))
        nothing = torch.full((3, 2), -1)
        nothing[2, 0] = step.groups[0].slots[0]
        out, lse = cache.attend(0, step, torch.randn(3, Q, D), indices=nothing, sinks=torch.ones(Q), return_lse=True)
    assert not out[:2].any()
    assert (lse[:2] == float("-inf")).all()
    assert out[2].any()
    assert lse[2].isfinite().all()


def test_kernels_run_on_the_threads_that_were_asked_for(monkeypatch):
    monkeypatch.setenv("KVPOOL_THREADS", "3")
    spec = kv.CacheSpec((LayerSpec((KVKind(1, 16),)),), dtype="fp32", max_seq_len=512)
    plan = kv.make_plan(spec, num_blocks=2, codec="fp32")
    assert kv.KVCache(plan).backend.num_threads == 3
    assert kv.KVCache(plan, num_threads=1).backend.num_threads == 1
    with pytest.raises(kv.UnsupportedError, match="num_threads=0"):
        kv.KVCache(plan, num_threads=0)
    kv.KVCache(plan, num_threads=1, backend="reference")  # runs on torch's threads
