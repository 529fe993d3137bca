"""Faults other caches shipped with windows, latents, indexers and states (cases c09, c14, c16, c19, f, g)."""

from __future__ import annotations

import pytest
import torch

import kvpool as kv
from kvpool.errors import UnsupportedError
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, StateKind
from kvpool.sequence import Sequence

KV = KVKind(2, 8)
N = 16


def make(*layers: LayerSpec, budget: str | None = "4MiB", **options: object) -> kv.KVCache:
    spec = kv.CacheSpec(layers=layers, dtype="fp32", max_seq_len=4096)
    settings = {"codec": {"*": "fp32", "index": "fp32"}, "tokens_per_block": N, "checkpoint_interval": 64, **options}
    return kv.KVCache(kv.make_plan(spec, budget=budget, **settings), backend="reference")


def window(size: int, **options: int) -> LayerSpec:
    return LayerSpec((KV,), Lifetime(window=size, **options))


def run(cache: kv.KVCache, sequence: Sequence, most: int = 4096) -> None:
    """Compute everything; the key and value of a token say its id, states say how many tokens they have seen."""
    while sequence.num_computed_tokens < len(sequence):
        with cache.step([(sequence, most)]) as step:
            content = step.token_ids.float()[:, None, None] + 0.5
            for layer, spec in enumerate(cache.plan.spec.layers):
                for kind in spec.kinds:
                    if isinstance(kind, KVKind):
                        kv_ = content.expand(-1, kind.num_kv_heads, kind.head_dim).contiguous()
                        cache.write(layer, step, kv_, -kv_)
                    elif isinstance(kind, LatentKind):
                        latent = content.expand(-1, 1, kind.kv_lora_rank).contiguous()
                        cache.write(layer, step, latent=latent, rope=-content.expand(-1, 1, kind.qk_rope_head_dim))
                    elif isinstance(kind, IndexerKind):
                        cache.write(layer, step, index=content.expand(-1, 1, kind.index_head_dim).contiguous())
                    elif isinstance(kind, StateKind):
                        seen = cache.state_read(layer, step, kind.name) + step.num_tokens[:, None].float()
                        cache.state_write(layer, step, kind.name, seen)


def slots_of(cache: kv.KVCache, sequence: Sequence) -> torch.Tensor:
    """The slot of every token in group 0."""
    table, length = cache.ledger.table(sequence.id, 0)
    n = cache.plan.tokens_per_block
    return torch.tensor([table[p // n] * n + p % n for p in range(length)])


def held(cache: kv.KVCache, layer: int, sequence: Sequence) -> list[int]:
    """Token ids whose keys a layer holds and its next row would see."""
    k, v = cache.read(layer, sequence)
    assert torch.equal(k, -v)
    tokens = [int(x) for x in k[:, 0, 0].tolist()]
    lifetime, position = cache.plan.spec.layers[layer].lifetime, len(sequence) - 1
    assert lifetime.window is not None
    return [t for p, t in enumerate(tokens) if p > position - lifetime.window or p < lifetime.sink_tokens]


def test_a_hit_is_as_long_as_every_group_can_serve() -> None:
    """c09: the full layers hold 96 tokens of a prefix; where the window layers lost theirs, no group says 96."""
    hits = []
    for num_others in range(4):
        cache = make(LayerSpec((KV,), FULL), window(20), budget=None, num_blocks={"full": 32, "window-20": 5})
        prompt = list(range(100, 200))
        for tokens in (prompt, *(range(2000 + 100 * i, 2060 + 100 * i) for i in range(num_others))):
            sequence = cache.sequence(tokens)
            run(cache, sequence, 16)
            sequence.release()
        again = cache.sequence(prompt)
        with cache.step([(again, 1)]):
            hit = again.num_cached_tokens
            full, windowed = (cache.ledger.table(again.id, group)[0] for group in (0, 1))
            assert all(full[p // N] >= 0 for p in range(hit))
            assert all(windowed[p // N] >= 0 for p in range(max(hit - 19, 0), hit)), "the next token reads what is gone"
        hits.append(hit)
        cache.check()
    assert hits[0] >= 96 > hits[-1]
    assert hits == sorted(hits, reverse=True)


def test_rewinding_is_exact_and_refuses_what_it_cannot_do() -> None:
    """c14: rejected tokens leave, a negative count never grows, a border of blocks is no border for rewinding."""
    cache = make(LayerSpec((KV,), FULL), window(8))
    sequence = cache.sequence(range(100, 130))
    run(cache, sequence)
    sequence.extend(range(500, 505))
    run(cache, sequence)
    sequence.rewind(3)
    assert sequence.tokens == [*range(100, 130), 500, 501]
    sequence.rewind(2)  # over the border at 32
    sequence.extend([7])
    run(cache, sequence)
    assert held(cache, 1, sequence) == [*range(123, 130), 7]
    with pytest.raises((ValueError, kv.KVError)):
        sequence.rewind(-2)
    assert len(sequence) == 31
    cache.check()


def test_a_state_is_not_rewound_to_where_nothing_was_kept() -> None:
    cache = make(LayerSpec((KV,), FULL), LayerSpec((StateKind("ssm", (4,)),)))
    sequence = cache.sequence(range(100, 190))
    run(cache, sequence)
    before = sequence.tokens
    with pytest.raises(UnsupportedError):
        sequence.rewind(3)
    assert sequence.tokens == before
    cache.check()


def test_a_state_is_found_only_at_its_own_position() -> None:
    """c16: the state saved at token 64 serves a prompt that agrees for 64 tokens or more, and says 64, not 90."""
    cache = make(LayerSpec((KV,), FULL), LayerSpec((StateKind("ssm", (4,)),)))
    first = cache.sequence(range(100, 196))
    run(cache, first)
    first.release()
    second = cache.sequence([*range(100, 190), 1, 2, 3, 4, 5, 6])
    with cache.step([(second, 4096)]) as step:
        assert second.num_cached_tokens in (64, 80)  # the interval's checkpoint, or the one before the prompt's end
        assert cache.state_read(1, step, "ssm")[0].tolist() == [float(second.num_cached_tokens)] * 4
        cache.state_write(1, step, "ssm", torch.zeros(1, 4))
    cache.check()


def test_the_same_prompt_reads_the_same_bytes_every_time() -> None:
    """c19: 40 window layers and 8 full ones; four times the same prompt of 1,464 tokens."""
    cache = make(*[window(24)] * 5, LayerSpec((KV,), FULL), budget="16MiB")
    prompt = [3 + 7 * i % 1000 for i in range(1464)]
    seen = []
    for _ in range(4):
        sequence = cache.sequence(prompt)
        run(cache, sequence)
        windows = [torch.tensor(held(cache, layer, sequence)) for layer in range(5)]
        seen.append(torch.cat([*windows, cache.read(5, sequence)[0].flatten()]))
        sequence.release()
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    assert cache.stats().hit_tokens >= 3 * 1440


@pytest.mark.parametrize("step", [1, 3, 6, 64])
def test_a_window_of_8_sees_the_last_8_whatever_the_steps(step: int) -> None:
    """f01, f05: when the length reaches the window, and with one row or many."""
    cache = make(window(8))
    sequence = cache.sequence(range(100, 106))
    run(cache, sequence, step)
    for length, token in ((7, 206), (8, 207), (9, 208), (10, 209)):
        sequence.extend([token])
        run(cache, sequence, step)
        assert held(cache, 0, sequence) == [*range(100, 106), *range(206, 210)][:length][-8:]


def test_a_window_of_128_attends_to_128() -> None:
    """f02: at position 200 the keys 73..200 count, itself included."""
    cache = make(window(128))
    sequence = cache.sequence(range(200))
    run(cache, sequence, 50)
    sequence.extend([200])
    with cache.step([(sequence, 1)]) as step:
        ones = torch.ones(1, 2, 8)
        cache.write(0, step, 0 * ones, 200 * ones)  # equal scores: the output is the mean of the values
        out = cache.attend(0, step, 0 * ones)
    values = [-(p + 0.5) for p in range(73, 200)] + [200.0]
    assert out[0, 0, 0].item() == pytest.approx(sum(values) / 128, rel=1e-5)


def test_what_leaves_behind_a_sink_is_the_oldest() -> None:
    """f07: 4 sink tokens and the last 8 of 20."""
    cache = make(window(8, sink_tokens=4), tokens_per_block=2)
    sequence = cache.sequence(range(100, 120))
    run(cache, sequence, 3)
    assert held(cache, 0, sequence) == [*range(100, 104), *range(112, 120)]


def test_a_partly_filled_latent_block_is_copied_alone() -> None:
    """g01: two writers behind one prefix of 40 tokens; the donor and every other block stay as they are."""
    cache = make(LayerSpec((LatentKind(12, 4),)), tokens_per_block=64)
    donor = cache.sequence(range(100, 140))
    run(cache, donor)
    forks = [donor.fork(), donor.fork()]
    for i, fork in enumerate(forks):
        fork.extend([900 + i])
        run(cache, fork)
    for i, fork in enumerate(forks):
        latent, rope = cache.take(0, slots_of(cache, fork))
        assert [int(x) for x in latent[:, 0, 0].tolist()] == [*range(100, 140), 900 + i]
        assert torch.equal(latent[:, 0, :4], -rope[:, 0])
    assert [int(x) for x in cache.take(0, slots_of(cache, donor))[0][:, 0, 0].tolist()] == [*range(100, 140)]


def test_indexer_keys_go_with_their_block() -> None:
    """g03: after everything is released, five new tokens have five keys in every pool of the group."""
    cache = make(LayerSpec((LatentKind(12, 4), IndexerKind(8))))
    first = cache.sequence(range(100, 150))
    run(cache, first)
    first.release(keep=False)
    second = cache.sequence(range(700, 705))
    run(cache, second)
    slots = slots_of(cache, second)
    assert cache.take_index(0, slots)[:, 0, 0].tolist() == [p + 0.5 for p in range(700, 705)]
    assert cache.take(0, slots)[0][:, 0, 0].tolist() == [p + 0.5 for p in range(700, 705)]


def test_blocks_of_another_model_identity_have_another_format() -> None:
    """g04: what a block means beyond its shape is the caller's to say; a different spec is a different format."""
    plans = [
        kv.make_plan(kv.CacheSpec(layers=(LayerSpec((LatentKind(12, rope), IndexerKind(8))),)), budget="1MiB")
        for rope in (4, 8)
    ]
    assert plans[0].block_format != plans[1].block_format


@pytest.mark.parametrize("codec", ["fp32", "fp8", "nvfp4-token"])
def test_blocks_times_tokens_are_tokens_in_every_format(codec: str) -> None:
    """g06: a block is `tokens_per_block` tokens, whatever is packed into it."""
    spec = kv.CacheSpec(layers=(LayerSpec((KVKind(2, 32),)),) * 3)
    plan = kv.make_plan(spec, budget="1MiB", codec=codec, tokens_per_block=N, max_seq_len=64)
    cache = kv.KVCache(plan, backend="reference")
    sequences = [cache.sequence(range(1000 * i, 1000 * i + 64)) for i in range(4)]
    with cache.step([(s, 64) for s in sequences]):
        assert cache.stats().used == 4 * 64 // N
