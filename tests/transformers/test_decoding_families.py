"""Every way of decoding on every family that attends to the pages: what transformers supports gives its tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import counted_attends
from tiny_models import prompts, tiny

import kvpool as kv
from kvpool.kinds import KVKind, LatentKind, StateKind
from kvpool.support import families
from kvpool.transformers import PagedCache
from kvpool.transformers.bridge import cache_argument

FAMILIES = sorted(row.name for row in families() if row.mode == "kernel")
#: Way -> (lengths of the rows, options).
WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "padded": ([21, 34, 9], {}),
    "several": ([21, 34], {"do_sample": True, "num_return_sequences": 2, "temperature": 0.8, "top_k": 40}),
    "beams": ([21, 34], {"num_beams": 3, "num_return_sequences": 2}),
    "lookup": ([12], {"prompt_lookup_num_tokens": 4}),
    "assisted": ([24], {}),
}
#: Ways that take computed tokens back.
DRAFTS = ("lookup", "assisted")
#: transformers itself gives other tokens in a padded batch than without padding.
UNPADDED = {"deepseek_v32", "glm_moe_dsa", "minimax"}


#: transformers' own MiniMaxCache leaves its states where they are when beams change places.
WRONG_THERE = {("minimax", "beams")}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_way_of_decoding_gives_the_tokens_of_transformers(family: str, way: str) -> None:
    if (family, way) in WRONG_THERE:
        pytest.skip("transformers' own tokens are wrong")
    lengths, options = WAYS[way]
    if family in UNPADDED and len(lengths) > 1:
        lengths = [lengths[0]] * len(lengths)
    model = tiny(family, seed=1)
    ids, mask = prompts(lengths)
    if way == "lookup":
        ids, mask = ids.repeat(1, 3), mask.repeat(1, 3)  # a prompt that repeats itself gives drafts
    if way == "assisted":
        options = {"assistant_model": tiny("llama", num_hidden_layers=1)}
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask, **options}

    def generate(**cache: Any) -> torch.Tensor:
        torch.manual_seed(0)
        tokens: torch.Tensor = model.generate(ids, **options, **cache)
        return tokens

    try:
        want = generate()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        refused = error
    else:
        refused = None
    cache = PagedCache(model, budget="16MiB", tokens_per_block=16, backend="cpu", codec={"*": "fp32", "index": "fp32"})
    kinds = [kind for layer in cache.cache.plan.spec.layers for kind in layer.kinds]
    attends = any(isinstance(kind, KVKind | LatentKind) for kind in kinds)
    if refused is not None:
        if way in DRAFTS and any(isinstance(kind, StateKind) for kind in kinds):
            with pytest.raises(
                (ValueError, RuntimeError, kv.UnsupportedError),
                match=r"stateful|requires a cache|cannot be rolled back",
            ):
                generate(**{cache_argument(model): cache})
            return
        pytest.skip(f"transformers itself: {refused}")
    for _ in range(2):
        with counted_attends(cache) as calls:
            assert torch.equal(generate(**{cache_argument(model): cache}), want)
        assert bool(calls) == attends
    cache.cache.check()


def test_the_list_is_that_of_the_support_matrix() -> None:
    assert len(FAMILIES) >= 39
