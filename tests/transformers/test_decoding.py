"""Every way of decoding that `generate` knows, on PagedCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import CACHE, check_same, counted_attends, generate
from tiny_models import prompts, tiny
from transformers import PreTrainedModel

import kvpool as kv
from kvpool.transformers import PagedCache
from kvpool.transformers.bridge import cache_argument

MODES = ["kernel", "gather"]


def paged(model: PreTrainedModel, mode: str, **options: Any) -> PagedCache:
    return PagedCache(model, budget="8MiB", tokens_per_block=16, backend="cpu", mode=mode, **options)


@pytest.mark.parametrize("mode", MODES)
def test_sampling_several_answers_gives_the_same_ones(mode: str) -> None:
    model = tiny("llama")
    ids, mask = prompts([21, 34])
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8, "top_k": 40}
    want = generate(model, ids, mask, None, **options)
    cache = paged(model, mode)
    for _ in range(2):
        assert check_same(want, generate(model, ids, mask, cache, **options), ids.shape[1]) == 0
    cache.cache.check()


#: Windows, latents, states and what is shared between layers: every kind of thing a beam takes along.
BEAMS = ["gemma3", "gemma4_shared", "llama4", "deepseek_v3", "kimi_linear", "qwen3_next", "jamba", "falcon_h1", "lfm2"]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, mode) for family in ("llama", "gpt2") for mode in MODES),
        *(pytest.param(family, "kernel", marks=pytest.mark.slow) for family in BEAMS),
    ],
)
def test_beam_search_finds_the_same_beams(family: str, mode: str) -> None:
    model = tiny(family)
    ids, mask = prompts([21, 34])
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 20, "output_scores": True}
    want = generate(model, ids, mask, None, **options)
    cache = paged(model, mode)
    for _ in range(2):
        got = generate(model, ids, mask, cache, **options)
        assert torch.equal(want.sequences, got.sequences)
        torch.testing.assert_close(want.sequences_scores, got.sequences_scores, rtol=0, atol=1e-4)
    cache.cache.check()


@pytest.mark.parametrize(("family", "mode"), [("llama", "kernel"), ("llama", "gather"), ("gemma2", "kernel")])
def test_prompt_lookup_accepts_and_crops(family: str, mode: str) -> None:
    model = tiny(family)
    ids, mask = prompts([12])
    ids, mask = ids.repeat(1, 3), mask.repeat(1, 3)  # a prompt that repeats itself gives drafts
    want = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    cache = paged(model, mode)
    for _ in range(2):
        got = model.generate(
            ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=5
        )
        assert torch.equal(want, got)
    cache.cache.check()


@pytest.mark.parametrize("mode", MODES)
def test_assisted_decoding_gives_the_same_tokens(mode: str) -> None:
    model, assistant = tiny("llama"), tiny("llama", num_hidden_layers=1)
    ids, mask = prompts([40])
    want = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    cache = paged(model, mode)
    for _ in range(2):
        got = model.generate(
            ids, attention_mask=mask, **{CACHE: cache}, assistant_model=assistant, max_new_tokens=24, do_sample=False
        )
        assert torch.equal(want, got)
    cache.cache.check()


def nearly(family: str, **config: int) -> torch.nn.Module:
    """A model that agrees with `tiny(family, seed=1)` now and then."""
    model, noise = tiny(family, seed=1), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.02 * weights.std() * torch.randn(weights.shape, generator=noise) if weights.dim() > 1 else 0
    model.generation_config.num_assistant_tokens = 6
    model.generation_config.assistant_confidence_threshold = 0
    return model


def test_convolutions_take_drafts_back_token_by_token() -> None:
    model, (ids, mask) = tiny("lfm2", seed=1), prompts([70])
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "assistant_model": nearly("lfm2")}
    want = model.generate(ids, **options)
    cache = paged(model, "kernel")
    kept: list[int] = []
    accept = cache.cache.accept
    cache.cache.accept = lambda row, indices: (kept.append(len(indices)), accept(row, indices))
    for _ in range(2):
        assert torch.equal(want, model.generate(ids, **options, **{CACHE: cache}))
    assert {0, 6} < set(kept[1:])  # all, none and some of six drafts
    seen = cache.cache.stats().hit_tokens
    assert torch.equal(want, model.generate(ids, **options, **{CACHE: cache}))
    assert cache.cache.stats().hit_tokens - seen == 32  # up to the last border before the drafts may begin
    cache.cache.check()


def test_a_failed_forward_of_drafts_leaves_the_row_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = tiny("lfm2", seed=1), prompts([12])
    ids, mask = ids.repeat(1, 3), mask.repeat(1, 3)
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "prompt_lookup_num_tokens": 5}
    want = model.generate(ids, **options)
    cache, calls = paged(model, "kernel"), []
    attend = cache.cache.attend

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:
            raise ZeroDivisionError
        return attend(*args, **kwargs)

    monkeypatch.setattr(cache.cache, "attend", failing)
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, **options, **{CACHE: cache})
    cache.cache.check()
    assert torch.equal(want, model.generate(ids, **options, **{CACHE: cache}))


def test_more_drafts_than_states_are_refused_with_the_numbers() -> None:
    model, (ids, mask) = tiny("lfm2", seed=1), prompts([12])
    ids, mask = ids.repeat(1, 3), mask.repeat(1, 3)
    cache = paged(model, "kernel", num_draft=2)
    with pytest.raises(kv.UnsupportedError, match="5 drafts at once: at most 2 can be taken back"):
        model.generate(
            ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=5
        )


@pytest.mark.parametrize("family", ["mamba2", "jamba", "qwen3_next", "minimax"])
def test_what_transformers_cannot_take_back_is_refused_here_too(family: str) -> None:
    model, (ids, mask) = tiny(family), prompts([12])
    ids, mask = ids.repeat(1, 3), mask.repeat(1, 3)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "prompt_lookup_num_tokens": 4}
    for cache in ({}, {cache_argument(model): paged(model, "kernel")}):
        with pytest.raises(
            (ValueError, RuntimeError, kv.UnsupportedError), match=r"stateful|requires a cache|cannot be rolled back"
        ):
            model.generate(ids, **options, **cache)


def test_a_second_assisted_call_reuses_a_long_prompt() -> None:
    model = tiny("llama")
    ids, mask = prompts([200])
    cache = paged(model, "kernel")
    options = {"attention_mask": mask, CACHE: cache, "max_new_tokens": 8, "do_sample": False}
    first = model.generate(ids, prompt_lookup_num_tokens=4, **options)
    seen = cache.cache.stats().hit_tokens
    second = model.generate(ids, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(first, second)
    assert cache.cache.stats().hit_tokens - seen >= 128


def test_beams_share_the_blocks_of_their_prompt() -> None:
    model = tiny("llama")
    ids, mask = prompts([160])
    cache = paged(model, "kernel")
    with counted_attends(cache) as calls:
        generate(model, ids, mask, cache, num_beams=4, max_new_tokens=8)
    assert calls[0] == 8
    # Ten full blocks once, and at most two of their own for each of four beams.
    assert cache.cache.stats().used <= 10 + 4 * 2


def test_a_crop_behind_a_window_computes_again_what_is_gone() -> None:
    model = tiny("mistral_windows")  # of 8 tokens
    ids, _ = prompts([64])
    cache = PagedCache(model, tokens_per_block=2, num_blocks=16, max_step_tokens=16, backend="cpu")
    given = torch.cat([ids[:, :34], torch.tensor([[5]])], 1)
    with torch.no_grad():
        for column in range(64):
            model(ids[:, column : column + 1], **{CACHE: cache})
        before = cache.rows.sequences[0]
        cache.crop(-30)
        assert cache.rows.sequences[0] is not before, "its window's blocks were given to later tokens"
        n = cache.begin(given)
        got = model(given[:, -n:], position_ids=torch.arange(35 - n, 35)[None], **{CACHE: cache}).logits[:, -1]
        want = model(given).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    cache.cache.check()
