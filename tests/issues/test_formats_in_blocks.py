"""Faults of layouts and formats that other projects shipped, through a whole cache. Each names its report."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvpool as kv
from kvpool.codecs import CODECS, get_codec
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec
from kvpool.kinds import Kind as LayerKind

BACKENDS = ("reference", "cpu")
KV_CODECS = tuple(name for name in CODECS if not name.startswith("index-"))
QUANTISED = tuple(name for name in KV_CODECS if get_codec(name).quantised)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(
    kinds: tuple[LayerKind, ...],
    codec: object,
    backend: str,
    layout: str = "HND",
    n: int = 16,
    blocks: int = 24,
    **options: object,
) -> kv.KVCache:
    """A cache of two layers, every byte 0xFF, its constants set: K and V different from each other and from 1."""
    spec = kv.CacheSpec((LayerSpec(kinds),) * 2, "fp32", max_seq_len=256)
    plan = kv.make_plan(spec, codec=codec, layout=layout, tokens_per_block=n, num_blocks=blocks)
    cache = kv.KVCache(plan, backend=backend, **options)  # type: ignore[arg-type]
    for slab in cache.pools.slabs:
        for block in range(slab.num_blocks):
            for piece in slab.block_bytes(block):
                piece.fill_(0xFF)
    for (layer, part), constants in cache.pools.constants.items():
        if constants.needs_scale:
            largest = cache.pools.part(layer, part).codec.largest
            constants.set(scale=(0.25 if part == "k" else 0.5) * (1 + layer) * 64 / largest)
        if constants.quantised and part != "index":
            part_of = cache.pools.part(layer, part)
            shape = (part_of.num_heads, part_of.vector.dim)
            m = 0.5 + torch.arange(shape[0] * shape[1]).reshape(shape) % 7 / 4
            constants.set(smoothing=m if part in ("k", "latent") else None, rotation=layer == 1)
    return cache


def fill(cache: kv.KVCache, tokens: list[int], k: torch.Tensor, v: torch.Tensor, most: int = 1000) -> object:
    """Write a new sequence to both layers; what was matched is not written again."""
    sequence = cache.sequence(tokens)
    while True:
        with cache.step([(sequence, most)]) as step:
            if not step.num_sequences:
                return sequence
            first = int(step.positions[0])
            rows = slice(first, first + step.total_tokens)
            for layer in range(2):
                cache.write(layer, step, k[rows], v[rows])
        if rows.stop == len(tokens):
            return sequence


def bytes_of(cache: kv.KVCache, sequence: object) -> list[bytes]:
    """All bytes of the full blocks of a sequence."""
    table, length = cache.ledger.table(sequence.id, 0)  # type: ignore[attr-defined]
    n = cache.plan.tokens_per_block
    slab = cache.pools.slabs[0]
    return [bytes(b"".join(bytes(p.numpy()) for p in slab.block_bytes(int(b)))) for b in table[: length // n]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [3, 4, 8])
@pytest.mark.parametrize("codec", ["nvfp4", "nvfp4-token"])
def test_nvfp4_reads_the_same_bits_in_every_layout_and_number_of_heads(codec: str, heads: int, backend: str) -> None:
    """vLLM issue 49012: the writer took the block size from an axis that is the head axis in HND."""
    k, v = normal(50, heads, 64), normal(50, heads, 64, seed=1)
    found = []
    for layout in ("HND", "NHD"):
        cache = make((KVKind(heads, 64),), codec, backend, layout)
        sequence = fill(cache, list(range(50)), k, v)
        found.append([*cache.read(0, sequence), *cache.read(1, sequence)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    for back, x in zip(found[0], (k, v, k, v), strict=True):
        assert (back - x).norm() / x.norm() < 0.15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "nvfp4-token"])
def test_a_strided_source_is_stored_as_a_contiguous_one(codec: str, backend: str) -> None:
    """aiter pull request 4531: only one stride of a transposed, split view was honoured."""
    heads, dim, t = 3, 64, 40
    both = normal(heads, t, 2 * dim)
    k, v = both.transpose(0, 1).split(dim, -1)
    assert not k.is_contiguous()
    read = []
    for source in ((k, v), (k.contiguous(), v.contiguous())):
        cache = make((KVKind(heads, dim),), codec, backend)
        read.append(cache.read(1, fill(cache, list(range(t)), *source)))
    for a, b in zip(*read, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [4, 8])
def test_keys_and_values_of_different_sizes_round_trip(heads: int, backend: str) -> None:
    """FlashInfer issue 877: one head size for both."""
    cache = make((KVKind(heads, 192, 128),), "bf16", backend)
    (group,) = cache.plan.groups
    assert group.bytes_per_block == 2 * heads * (192 + 128) * 2 * 16
    k, v = normal(40, heads, 192).bfloat16(), normal(40, heads, 128, seed=1).bfloat16()
    back = cache.read(0, fill(cache, list(range(40)), k, v))
    assert torch.equal(back[0], k.float())
    assert torch.equal(back[1], v.float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["index-fp8", "index-fp4"])
def test_indexer_keys_beyond_the_first_block_are_each_their_own(codec: str, backend: str) -> None:
    """vLLM issue 52109: written flat, read tiled, right in the first block only."""
    cache = make((LatentKind(64, 32), IndexerKind(128)), {"*": "bf16", "index": codec}, backend, n=32)
    t = 150
    keys = (1.0 + torch.arange(t))[:, None, None].expand(t, 1, 128) * 2.0 ** (torch.arange(128) % 3)
    sequence = cache.sequence(range(t))
    with cache.step([(sequence, t)]) as step:
        cache.write(0, step, latent=normal(t, 1, 64), rope=normal(t, 1, 32), index=keys)
        slots = step.groups[0].slots.clone()
    part = cache.pools.part(0, "index")
    out = torch.empty(t, 1, 128)
    cache.backend.read(part, slots, out)
    step_size = {"index-fp8": 2.0**-4, "index-fp4": 0.34}[codec]
    assert ((out - keys).abs() <= step_size * keys).all()
    assert out[:, 0].sum(-1).diff().min() >= 0  # token t holds value t, in order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", QUANTISED)
def test_every_path_of_reading_uses_the_same_scales(codec: str, backend: str) -> None:
    """FlashInfer issue 4979: one of two paths ignored k_scale and v_scale."""
    cache = make((KVKind(2, 64),), codec, backend)
    k, v = normal(40, 2, 64), normal(40, 2, 64, seed=1) * 3
    sequence = cache.sequence(range(40))
    with cache.step([(sequence, 40)]) as step:
        for layer in range(2):
            cache.write(layer, step, k, v)
        q = normal(40, 4, 64, seed=2)
        attended = [cache.attend(layer, step, q) for layer in range(2)]
        gathered = [cache.gather(layer, step)[:2] for layer in range(2)]
    for layer in range(2):
        read_k, read_v = cache.read(layer, sequence)
        assert torch.equal(gathered[layer][0].float(), read_k)
        assert torch.equal(gathered[layer][1].float(), read_v)
        assert (read_k - k).norm() / k.norm() < 0.2
        assert (read_v - v).norm() / v.norm() < 0.2
        mask = torch.ones(40, 40, dtype=torch.bool).tril()
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), read_k.transpose(0, 1).repeat_interleave(2, 0),
            read_v.transpose(0, 1).repeat_interleave(2, 0), attn_mask=mask,
        ).transpose(0, 1)  # fmt: skip
        error = (attended[layer] - want).norm() / want.norm()
        assert error < 1e-2, error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", KV_CODECS)
def test_a_reused_prefix_has_the_bytes_and_scales_of_a_fresh_one(codec: str, backend: str) -> None:
    """TensorRT-LLM issue 2699: FP8 with block reuse gave other text than without."""
    k, v = normal(70, 2, 64), normal(70, 2, 64, seed=1) * 3
    shared, other = make((KVKind(2, 64),), codec, backend), make((KVKind(2, 64),), codec, backend)
    first = fill(shared, list(range(60)), k, v)
    first.release()  # type: ignore[attr-defined]
    tokens = list(range(55)) + list(range(500, 515))
    k[55:], v[55:] = normal(15, 2, 64, seed=2), normal(15, 2, 64, seed=3)
    reused, fresh = fill(shared, tokens, k, v), fill(other, tokens, k, v, most=7)
    assert reused.num_cached_tokens == 55  # type: ignore[attr-defined]  # three blocks, and seven tokens of one copied
    assert bytes_of(shared, reused) == bytes_of(other, fresh)
    for layer in range(2):
        for a, b in zip(shared.read(layer, reused), other.read(layer, fresh), strict=True):
            assert torch.equal(a, b)
    shared.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", QUANTISED)
def test_rewound_and_forked_tokens_take_their_own_scales(codec: str, backend: str) -> None:
    """A block written again after a rewind, or copied for a fork, must not keep a scale of what was there."""
    cache = make((KVKind(2, 64),), codec, backend)
    large = (normal(40, 2, 64) * 4).clamp(-12, 12)
    sequence = fill(cache, list(range(40)), large, large)
    sequence.rewind(9)  # type: ignore[attr-defined]
    fork = sequence.fork()  # type: ignore[attr-defined]
    for target, seed in ((sequence, 2), (fork, 3)):
        target.extend(range(900 + seed * 10, 909 + seed * 10))
        x = normal(9, 2, 64, seed=seed) * 0.5
        with cache.step([(target, 100)]) as step:
            assert step.total_tokens == 9
            for layer in range(2):
                cache.write(layer, step, x, x)
        for layer, part in itertools.product(range(2), range(2)):
            back = cache.read(layer, target)[part]
            assert (back[:31] - large[:31]).norm() / large[:31].norm() < 0.2
            limit = 0.2 if not get_codec(codec).constant_scale else 0.6
            assert (back[31:] - x).norm() / x.norm() < limit
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", QUANTISED)
def test_blocks_that_were_offloaded_come_back_with_their_scales(codec: str, backend: str) -> None:
    """FlashInfer issue 4979, its last path: after a round trip to the host, reading and attending give the same."""
    cache = make((KVKind(2, 64),), codec, backend, blocks=6, host_size="1MiB")
    k, v, q = normal(64, 2, 64), normal(64, 2, 64, seed=1) * 3, normal(1, 4, 64, seed=2)

    def look(sequence: object) -> list[torch.Tensor]:
        sequence.extend([7])  # type: ignore[attr-defined]
        with cache.step([(sequence, 1)]) as step:  # type: ignore[list-item]
            cache.write(1, step, k[:1], v[:1])
            return [cache.attend(1, step, q), *cache.read(1, sequence)]  # type: ignore[arg-type,list-item]

    first = fill(cache, list(range(64)), k, v)
    before = look(first)
    first.release()  # type: ignore[attr-defined]
    fill(cache, list(range(500, 564)), v, k).release()  # type: ignore[attr-defined]  # its blocks are needed
    again = fill(cache, list(range(64)), k, v)
    assert again.num_cached_tokens >= 48  # type: ignore[attr-defined]
    assert cache.tier_stats()["host"].hit > 0
    for a, b in zip(before, look(again), strict=True):
        assert torch.equal(a, b)
    cache.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", KV_CODECS)
def test_what_nobody_wrote_and_padding_never_reach_an_output(codec: str, backend: str) -> None:
    """FlashInfer issue 941: NaN in unfilled slots of the last page. transformers 46765: padding wrote a real slot."""
    cache = make((KVKind(2, 64),), codec, backend, n=4, blocks=40)
    k, v, q = normal(13, 2, 64), normal(13, 2, 64, seed=1), normal(13, 4, 64, seed=2)
    first = cache.sequence(range(13))
    with cache.step([(first, 13)]) as step:
        cache.write(0, step, torch.full((13, 2, 64), torch.nan), torch.full((13, 2, 64), torch.nan))
    first.release(keep=False)
    second = cache.sequence(range(50, 63))
    with cache.step([(second, 13)]) as step:
        cache.write(0, step, k, v)
        out = cache.attend(0, step, q)
        before = cache.read(0, second)
        step.groups[0].slots[5:] = -1
        cache.write(0, step, torch.full((13, 2, 64), torch.nan), torch.full((13, 2, 64), torch.nan))
        after = cache.read(0, second)
    assert out.isfinite().all()
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[5:], b[5:])
    assert all(x.isfinite().all() for x in before)
