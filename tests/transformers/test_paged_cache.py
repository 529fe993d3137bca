"""PagedCache by hand: rows, steps, errors, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from harness import CACHE, check_same, generate, recorded_steps
from tiny_models import prompts, tiny

from kvpool.errors import KVError, LayoutError, OutOfBlocks, UnsupportedError
from kvpool.transformers import PagedCache


def test_the_model_keeps_its_own_attention_outside_our_forwards() -> None:
    model = tiny("llama")
    before, own = model.config._attn_implementation, model.prepare_inputs_for_generation
    ids, mask = prompts([20])
    want = generate(model, ids, mask, None)
    with PagedCache(model, budget="1MiB", backend="cpu") as cache:
        generate(model, ids, mask, cache)
        assert model.config._attn_implementation == before
        assert check_same(want, generate(model, ids, mask, None), 20) == 0  # its own cache, while ours lives
    assert model.prepare_inputs_for_generation == own
    assert not any("kvpool" in name for module in model.modules() for name in module.__dict__)
    assert check_same(want, generate(model, ids, mask, None), 20) == 0


def test_two_caches_of_one_model_do_not_meet() -> None:
    model = tiny("llama")
    ids, mask = prompts([40])
    one, two = (PagedCache(model, budget="1MiB", backend="cpu") for _ in range(2))
    generate(model, ids, mask, one)
    with recorded_steps(two) as totals:
        generate(model, ids, mask, two)
    assert totals[0] == 40
    one.close()
    assert check_same(generate(model, ids, mask, None), generate(model, ids, mask, two), 40) == 0


def test_a_model_called_directly_goes_on_from_what_is_held() -> None:
    model = tiny("llama")
    ids, _ = prompts([30])
    cache = PagedCache(model, budget="1MiB", backend="cpu")
    with torch.no_grad():
        want = model(ids).logits
        parts = [model(part, **{CACHE: cache}, use_cache=True).logits for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:])]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-3)
    assert cache.get_seq_length() == 30


def test_begin_says_how_many_columns_are_left_to_compute() -> None:
    model = tiny("llama")
    ids, mask = prompts([48, 40])
    cache = PagedCache(model, budget="1MiB", tokens_per_block=16, backend="cpu")
    assert cache.begin(ids, mask) == 48
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    more = torch.cat([ids, prompts([5, 5], seed=2)[0]], 1)
    longer = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    assert cache.begin(more, longer) == 5
    assert cache.get_seq_length() == 48
    with pytest.raises(LayoutError, match=r"computes \[2, 5\] ids, the model was given \[2, 53\]"):
        model(more, attention_mask=longer, **{CACHE: cache})


def test_a_failed_forward_can_be_repeated() -> None:
    model = tiny("llama")
    ids, mask = prompts([40, 21])
    cache = PagedCache(model, budget="1MiB", tokens_per_block=16, backend="cpu")
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, ids, mask, cache)
    handle.remove()
    assert cache.step is None
    cache.cache.check()
    with recorded_steps(cache) as totals:
        got = generate(model, ids, mask, cache)
    assert totals[0] == 61
    assert check_same(generate(model, ids, mask, None), got, 40) == 0


def test_an_interrupt_leaves_model_and_cache_usable() -> None:
    model = tiny("llama")
    own = model.config._attn_implementation
    ids, mask = prompts([40])
    cache = PagedCache(model, budget="1MiB", backend="cpu")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, mask, cache)
    handle.remove()
    want = generate(model, ids, mask, None)
    assert model.config._attn_implementation == own
    assert check_same(want, generate(model, ids, mask, cache), 40) == 0
    cache.cache.check()


def test_reset_frees_the_rows_and_remembers_the_tokens() -> None:
    model = tiny("llama")
    ids, mask = prompts([40])
    cache = PagedCache(model, budget="1MiB", tokens_per_block=16, backend="cpu")
    generate(model, ids, mask, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.cache.stats().used == 0
    with recorded_steps(cache) as totals:
        generate(model, ids, mask, cache)
    assert totals[0] == 1


def test_salts_keep_caches_of_tenants_apart() -> None:
    model = tiny("llama")
    ids, mask = prompts([40])
    cache = PagedCache(model, budget="1MiB", salt="a", backend="cpu")
    generate(model, ids, mask, cache)
    cache.reset()
    cache.rows.salt = "b"
    with recorded_steps(cache) as totals:
        generate(model, ids, mask, cache)
    assert totals[0] == 40


def test_padding_on_the_right_is_refused() -> None:
    model = tiny("llama")
    ids, mask = prompts([20, 12])
    with pytest.raises(LayoutError, match="padding must stand on the left"):
        generate(model, ids, mask.flip(1), PagedCache(model, budget="1MiB", backend="cpu"))


def test_a_prompt_that_cannot_fit_fails_with_the_numbers_and_others_go_on() -> None:
    model = tiny("llama")
    cache = PagedCache(model, budget="64KiB", tokens_per_block=16, backend="cpu")
    capacity = cache.cache.plan.groups[0].num_blocks * 16
    ids, mask = prompts([capacity + 16])
    with pytest.raises((OutOfBlocks, KVError), match=r"\d+"):
        generate(model, ids, mask, cache, max_new_tokens=2)
    ids, mask = prompts([20])
    assert check_same(generate(model, ids, mask, None), generate(model, ids, mask, cache), 20) == 0
    cache.cache.check()


def test_embeddings_and_unknown_modes_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedError, match="kernel"):
        PagedCache(model, budget="1MiB", mode="fast")
    cache = PagedCache(model, budget="1MiB", backend="cpu")
    embeds = model.get_input_embeddings()(prompts([9])[0])
    with pytest.raises(UnsupportedError, match="pass input_ids"):
        model.generate(inputs_embeds=embeds, **{CACHE: cache}, max_new_tokens=2)


def test_a_model_with_attention_of_its_own_is_gathered_for_or_refused() -> None:
    model = tiny("falcon")
    with pytest.raises(UnsupportedError, match="mode='gather'"):
        PagedCache(model, budget="1MiB", mode="kernel")
    ids, mask = prompts([20, 9])
    cache = PagedCache(model, budget="1MiB", backend="cpu")
    assert cache.gathers
    assert check_same(generate(model, ids, mask, None), generate(model, ids, mask, cache), 20) == 0


def test_nothing_keeps_a_dropped_cache_alive() -> None:
    model = tiny("llama")
    ids, mask = prompts([20])
    cache = PagedCache(model, budget="1MiB", backend="cpu")
    generate(model, ids, mask, cache)
    reference = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert reference() is None
    finally:
        gc.enable()
