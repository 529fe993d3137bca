"""Rows of a batch are cropped, repeated, selected."""

from __future__ import annotations

import pytest
import torch
from harness import CACHE
from tiny_models import prompts, tiny

from kvpool.errors import LayoutError
from kvpool.transformers import PagedCache


def test_crop_forgets_the_last_columns() -> None:
    model = tiny("llama")
    ids, _ = prompts([40, 40])
    cache = PagedCache(model, budget="1MiB", tokens_per_block=16, backend="cpu")
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        cache.crop(-13)
        assert cache.get_seq_length() == 27
        other = prompts([6, 6], seed=5)[0]
        got = model(other, **{CACHE: cache}).logits
        want = model(torch.cat([ids[:, :27], other], 1)).logits[:, 27:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    with pytest.raises(LayoutError, match="negative"):
        cache.crop(3)
    cache.cache.check()


@pytest.mark.parametrize("operation", ["repeat", "select", "mask"])
def test_rows_are_repeated_and_selected(operation: str) -> None:
    model = tiny("llama")
    ids, _ = prompts([20, 20, 20])
    cache = PagedCache(model, budget="1MiB", tokens_per_block=16, backend="cpu")
    rows = {"repeat": [0, 0, 1, 1, 2, 2], "select": [2, 0], "mask": [0, 2]}[operation]
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        if operation == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor([True, False, True] if operation == "mask" else rows))
        last = torch.arange(5, 5 + len(rows))[:, None]
        got = model(last, **{CACHE: cache}).logits
        want = model(torch.cat([ids[rows], last], 1)).logits[:, -1:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    cache.cache.check()
