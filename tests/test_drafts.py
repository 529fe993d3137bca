"""Speculation: a tree of drafts is verified in one step, the accepted path is kept, the rest never was."""

from __future__ import annotations

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec

H, D, Q, N = 2, 32, 4, 8


def make_cache(backend: str, codec: str = "fp32") -> kv.KVCache:
    spec = kv.CacheSpec(tuple(LayerSpec((KVKind(H, D),)) for _ in range(2)), dtype="fp32", max_seq_len=256)
    plan = kv.make_plan(
        spec, num_blocks=64, codec=codec, tokens_per_block=N, max_sequences=4, max_step_tokens=64, num_draft=6
    )
    return kv.KVCache(plan, backend=backend)


def vectors(tokens, seed):
    """Keys, values or queries that depend on the token alone, so that a path can be recomputed elsewhere."""
    generator = torch.Generator()
    rows = []
    for token in tokens:
        generator.manual_seed(1000 * seed + int(token))
        rows.append(torch.randn(Q if seed == 3 else H, D, generator=generator))
    return torch.stack(rows)


def forward(cache, step):
    out = None
    for layer in range(2):
        cache.write(layer, step, vectors(step.token_ids, 1), vectors(step.token_ids, 2))
        out = cache.attend(layer, step, vectors(step.token_ids, 3))
    return out


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_tree_of_drafts_attends_like_its_paths_alone(backend, codec):
    prompt, drafts, parents = list(range(13)), [50, 51, 52, 53, 54], [-1, -1, 0, 0, 2]
    cache = make_cache(backend, codec)
    sequence, other = cache.sequence(prompt), cache.sequence(list(range(80, 85)))
    with cache.step([(sequence, 12), (other, 3)]) as step:
        forward(cache, step)
    with cache.step([(sequence, 1), (other, 2)], drafts={sequence: (drafts, parents)}) as step:
        out = forward(cache, step)
        rows = step.draft_rows[sequence.id]
    assert len(sequence) == 13  # nothing drafted is known

    for index in range(len(drafts)):
        path = [index]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = make_cache(backend, codec)
        plain = alone.sequence(prompt + [drafts[i] for i in path])
        with alone.step([(plain, 12)]) as step:
            forward(alone, step)
        with alone.step([(plain, 100)]) as step:
            want = forward(alone, step)[-1]
        torch.testing.assert_close(out[rows][index], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_accepted_path_is_kept_in_all_layers_and_the_rest_is_gone(backend):
    prompt, drafts, parents = list(range(13)), [50, 51, 52, 53, 54], [-1, -1, 0, 0, 2]
    cache = make_cache(backend)
    sequence = cache.sequence(prompt)
    with cache.step([(sequence, 100)], drafts={sequence: (drafts, parents)}) as step:
        forward(cache, step)
    before = cache.stats().stored_blocks
    cache.accept(sequence, [0, 2, 4])
    tokens = [*prompt, 50, 52, 54]
    assert sequence.tokens == tokens
    for layer in range(2):
        k, v = cache.read(layer, sequence)
        assert torch.equal(k, vectors(tokens, 1))
        assert torch.equal(v, vectors(tokens, 2))
    cache.check()
    sequence.release()
    assert cache.peek([*prompt, 50, 51, 54]) == 14  # a rejected draft was never matchable
    assert cache.peek([*tokens, 99]) == 16
    assert cache.stats().stored_blocks >= before


def test_drafts_that_are_not_accepted_leave_no_trace():
    cache = make_cache("cpu")
    sequence = cache.sequence(list(range(13)))
    with cache.step([(sequence, 100)], drafts={sequence: ([50, 51, 52], None)}) as step:
        forward(cache, step)
    cache.accept(sequence, [])
    cache.check()
    assert sequence.tokens == list(range(13))
    sequence.release()
    assert cache.stats().used == 0
    assert cache.peek([*range(13), 50]) == 13


def test_pin_keeps_a_prefix_and_clear_and_reset_forget_it():
    cache = make_cache("cpu")
    sequence = cache.sequence(list(range(16)))
    with cache.step([(sequence, 100)]) as step:
        forward(cache, step)
    sequence.release()
    pin = cache.pin(list(range(16)))
    for start in range(100, 2000, 50):  # far more than 64 blocks
        filler = cache.sequence(list(range(start, start + 40)))
        with cache.step([(filler, 100)]) as step:
            forward(cache, step)
        filler.release()
    assert cache.peek(list(range(17))) == 16
    cache.unpin(pin)
    cache.clear()
    assert cache.peek(list(range(17))) == 0
    cache.reset()
    assert cache.stats().free == cache.stats().committed
    cache.check()
