"""Beam search on shared blocks: the beams hold their prompt once. `python examples/beam_search.py`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpool.transformers import PagedCache

PROMPT, BEAMS, NEW = 400, 8, 24


def main() -> None:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 1000, (1, PROMPT))
    options = {"num_beams": BEAMS, "max_new_tokens": NEW, "do_sample": False}

    cache = PagedCache(model, budget="16MiB", tokens_per_block=16)
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(ours, theirs), "beam search on shared blocks found other beams"

    used = cache.cache.stats().used
    apart = BEAMS * -(-(PROMPT + NEW) // 16)
    print(f"{BEAMS} beams of {PROMPT} + {NEW} tokens hold {used} blocks of 16 tokens; each with its own: {apart}")
    assert used < apart / 3


if __name__ == "__main__":
    main()
