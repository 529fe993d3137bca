"""Greedy `generate` through PagedCache gives the tokens that transformers' own cache gives."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import CACHE, check_same, counted_attends, generate, recorded_steps
from tiny_models import FAMILIES, prompts, tiny

from kvpool.transformers import PagedCache

DENSE = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gpt2")
NEW = 12


#: One family in every way; the others here as test_families does not run them.
WAYS = [
    *(("llama", mode, backend) for mode in ("kernel", "gather") for backend in ("reference", "cpu")),
    *((family, "gather", "reference") for family in DENSE[1:]),
]


@pytest.mark.parametrize(("family", "mode", "backend"), WAYS)
def test_tokens_are_those_of_transformers_and_a_second_round_computes_only_the_rest(
    family: str, mode: str, backend: str
) -> None:
    model = tiny(family)
    ids, mask = prompts([41, 12, 30], shared=10)
    cache = PagedCache(model, budget="4MiB", tokens_per_block=16, mode=mode, backend=backend)
    want = generate(model, ids, mask, None)
    got = generate(model, ids, mask, cache)
    assert check_same(want, got, ids.shape[1]) == 0
    # A longer prompt per row: what was said, and a new question.
    more, _ = prompts([9, 9, 9], seed=1)
    ids2 = torch.cat([got.sequences, more], 1)
    mask2 = torch.cat([mask, torch.ones(3, NEW + 9, dtype=torch.long)], 1)
    with recorded_steps(cache) as totals:
        again = generate(model, ids2, mask2, cache)
    assert check_same(generate(model, ids2, mask2, None), again, ids2.shape[1]) == 0
    # All but the last generated token of every row is held; it and the nine new ones are computed.
    assert totals == [3 * 10] + [3] * (NEW - 1)
    cache.cache.check()


def test_gather_mode_never_attends_in_the_backend() -> None:
    model = tiny("llama")
    ids, mask = prompts([20, 5])
    cache = PagedCache(model, budget="4MiB", mode="gather", backend="cpu")
    with counted_attends(cache) as calls:
        generate(model, ids, mask, cache)
    assert not calls


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("tokens_per_block", [2, 16, 64])
def test_layout_and_block_size_do_not_show(layout: str, tokens_per_block: int) -> None:
    model = tiny("llama")
    ids, mask = prompts([33, 70], shared=20)
    cache = PagedCache(model, budget="4MiB", layout=layout, tokens_per_block=tokens_per_block, backend="cpu")
    want = generate(model, ids, mask, None)
    for _ in range(2):
        assert check_same(want, generate(model, ids, mask, cache), ids.shape[1]) == 0


def test_a_new_prompt_finds_the_shared_prefix_of_an_old_one() -> None:
    model = tiny("llama")
    ids, mask = prompts([90], seed=3)
    cache = PagedCache(model, budget="4MiB", tokens_per_block=16, backend="cpu")
    generate(model, ids, mask, cache)
    other = ids.clone()
    other[:, 70:] = prompts([20], seed=4)[0]
    with recorded_steps(cache) as totals:
        got = generate(model, other, mask, cache)
    # 64 tokens are four full blocks; of the fifth, 6 tokens are common.
    assert totals[0] == 90 - 70
    assert check_same(generate(model, other, mask, None), got, 90) == 0


STATES = ["mamba2", "kimi_linear", "qwen3_next", "qwen3_5", "bamba", "nemotron_h", "falcon_h1", "granitemoehybrid",
          "zamba2", "lfm2", "minimax"]  # fmt: skip


@pytest.mark.parametrize("family", ["mamba", "jamba", *(pytest.param(f, marks=pytest.mark.slow) for f in STATES)])
def test_a_new_prompt_goes_on_from_the_state_of_an_old_one(family: str) -> None:
    """By several tokens at once, or one by one where transformers cannot: what the first step finds decides."""
    model = tiny(family, seed=1)
    cache = PagedCache(model, budget="8MiB", tokens_per_block=16, codec="fp32", backend="cpu")
    for seed in range(3):
        ids, mask = prompts([75], seed=seed, shared=0)
        ids[:, :70] = prompts([70])[0]
        before = cache.cache.stats().hit_tokens
        got = generate(model, ids, mask, cache, max_new_tokens=8)
        assert check_same(generate(model, ids, mask, None, max_new_tokens=8), got, 75) == 0
        assert (cache.cache.stats().hit_tokens - before > 0) == (seed > 0)
    cache.cache.check()


def test_equal_rows_of_one_batch_compute_their_full_blocks_once() -> None:
    model = tiny("llama")
    ids, mask = prompts([50])
    ids, mask = ids.repeat(3, 1), mask.repeat(3, 1)
    cache = PagedCache(model, budget="4MiB", tokens_per_block=16, backend="cpu")
    with recorded_steps(cache) as totals:
        got = generate(model, ids, mask, cache)
    assert totals[0] == 50 + 2 * 2
    assert check_same(generate(model, ids, mask, None), got, 50) == 0


def test_the_older_name_of_the_argument_works() -> None:
    model = tiny("llama")
    ids, mask = prompts([20])
    cache = PagedCache(model, budget="4MiB", backend="cpu")
    warned = pytest.warns(FutureWarning, match="past_key_values") if CACHE == "cache" else contextlib.nullcontext()
    with counted_attends(cache) as calls, warned:
        got = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert calls[0] == 4
    assert torch.equal(got, model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False))


def test_prefill_in_chunks_gives_the_same_tokens() -> None:
    model = tiny("llama")
    ids, mask = prompts([40, 9])
    cache = PagedCache(model, budget="4MiB", tokens_per_block=16, backend="cpu")
    want = generate(model, ids, mask, None)
    for _ in range(2):
        got = generate(model, ids, mask, cache, prefill_chunk_size=16)
        assert check_same(want, got, ids.shape[1]) == 0


def test_the_families_of_this_file_are_known() -> None:
    assert set(DENSE) <= set(FAMILIES)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompts_longer_than_a_step_are_computed_in_several(family: str) -> None:
    model = tiny(family)
    ids, mask = prompts([90, 12, 40], shared=10)
    cache = PagedCache(model, budget="4MiB", tokens_per_block=16, max_step_tokens=24, backend="cpu")
    with recorded_steps(cache) as totals:
        got = generate(model, ids, mask, cache)
    assert max(totals) <= 24
    assert check_same(generate(model, ids, mask, None), got, 90) == 0
    cache.cache.check()
