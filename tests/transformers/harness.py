"""Runs one model with transformers' own cache and with ours, and compares what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvpool.transformers import PagedCache
from kvpool.transformers.bridge import cache_argument

#: A token may differ where the two best logits are closer than this.
NEAR_TIE = 1e-4
#: fp32: two orders of summing a few hundred products of size one.
LOGIT_TOLERANCE = 2e-3


#: What this version of transformers calls the cache of a forward and of `generate`.
CACHE = cache_argument(LlamaForCausalLM)


def generate(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: object, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    options |= {cache_argument(model): cache, "attention_mask": mask}
    return model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)


def generate_alone(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: None, **options: Any) -> Any:
    """Generate row by row, without padding; the result looks like that of the batch."""
    rows = [
        generate(model, i[m.bool()][None], m[m.bool()][None], cache, **options) for i, m in zip(ids, mask, strict=True)
    ]
    padding = [torch.zeros(1, ids.shape[1] - int(m.sum()), dtype=ids.dtype) for m in mask]
    sequences = torch.cat([torch.cat([p, row.sequences], 1) for p, row in zip(padding, rows, strict=True)])
    logits = [torch.cat(step) for step in zip(*(row.logits for row in rows), strict=True)]
    return SimpleNamespace(sequences=sequences, logits=logits)


def check_same(want: Any, got: Any, prompt_length: int) -> int:
    """Tokens are equal up to a near tie, logits are close up to there; return the number of near ties."""
    ties = 0
    for b in range(len(want.sequences)):
        for step, (expected, actual) in enumerate(zip(want.logits, got.logits, strict=True)):
            best = expected[b].topk(2).values
            gap = (expected[b] - actual[b]).abs().max().item()
            assert gap < LOGIT_TOLERANCE, f"row {b}, step {step}: logits differ by {gap}"
            column = prompt_length + step
            if want.sequences[b, column] != got.sequences[b, column]:
                assert best[0] - best[1] < NEAR_TIE, f"row {b}, step {step}: another token, and no near tie"
                ties += 1
                break
    return ties


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(method)` in the place of a method of one object."""
    before = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


@contextmanager
def counted(owner: object, name: str, key: Callable[..., int]) -> Iterator[Counter[int]]:
    """Count the calls of a method by what `key` makes of their arguments."""
    calls: Counter[int] = Counter()

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[key(*args)] += 1
            return original(*args, **kwargs)

        return call

    with replaced(owner, name, make) if hasattr(owner, name) else nullcontext():
        yield calls


def counted_attends(cache: PagedCache) -> AbstractContextManager[Counter[int]]:
    """Count the attention calls that reach the backend, by layer (the layer whose keys are read)."""
    kv = cache.cache
    layers = {kv._layers[i].v: i for i in reversed(range(kv.plan.spec.num_layers)) if kv._layers[i].v is not None}
    return counted(kv.backend, "attend", lambda q, k, v, *rest: layers[v])


@contextmanager
def recorded_steps(cache: PagedCache) -> Iterator[list[int]]:
    """Record how many tokens every step computes."""
    totals: list[int] = []

    def make(original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            opened = original(*args, **kwargs)
            totals.append(opened.total_tokens)
            return opened

        return step

    with replaced(cache.cache, "step", make):
        yield totals
