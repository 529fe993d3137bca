"""A second process over the same directory finds what the first computed, states included, and says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import generate
from tiny_models import VOCAB, tiny

import kvpool as kv
from kvpool.transformers import PagedCache

#: Attention beside Mamba 1 (whose scan goes on by single tokens), gated delta nets, short convolutions; windows; none.
FAMILIES = ["jamba", "qwen3_next", "lfm2", "mistral_windows", "mamba2"]
LENGTH = 75


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restart_computes_no_stored_prefix_and_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    torch.manual_seed(3)
    ids = torch.randint(3, VOCAB, (1, LENGTH))
    mask = torch.ones_like(ids)
    longer = torch.cat([ids, torch.randint(3, VOCAB, (1, 9))], 1)
    want = [generate(model, x, torch.ones_like(x), None).sequences for x in (ids, longer)]
    plan = kv.make_plan(
        kv.CacheSpec.from_config(model.config), budget="8MiB", codec="fp32", tokens_per_block=16, max_seq_len=512
    )
    for process in range(2):
        with kv.KVCache(plan, disk=tmp_path, disk_size="256MiB", model=family) as cache:
            paged = PagedCache(model, cache=cache)
            assert torch.equal(generate(model, ids, mask, paged).sequences, want[0])
            found = cache.stats().onboarded_tokens
            assert found == (64 if process else 0), "all whole blocks before the last token"
            assert torch.equal(generate(model, longer, torch.ones_like(longer), paged).sequences, want[1])
            paged.rows.release()
            cache.check()


def test_all_rows_of_a_batch_wait_for_what_is_on_its_way(tmp_path: Path) -> None:
    model = tiny("llama")
    torch.manual_seed(3)
    ids = torch.randint(3, VOCAB, (3, LENGTH))
    mask = torch.ones_like(ids)
    want = generate(model, ids, mask, None).sequences
    plan = kv.make_plan(
        kv.CacheSpec.from_config(model.config), budget="8MiB", codec="fp32", tokens_per_block=16, max_seq_len=512
    )
    for process in range(2):
        with kv.KVCache(plan, disk=tmp_path, model="llama") as cache:
            paged = PagedCache(model, cache=cache)
            batch = torch.cat([ids[:2], ids[:1] + 1], 0) if process == 0 else ids  # one row is not on disk
            said = generate(model, batch, mask, paged).sequences
            assert torch.equal(said, want) or process == 0
            paged.rows.release()
            assert cache.stats().onboarded_tokens == (2 * 64 if process else 0)
