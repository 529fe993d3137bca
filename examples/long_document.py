"""Questions about one long document, read once and kept in int8: `python examples/long_document.py`.

The document is computed in steps of bounded size; every question afterwards finds it and computes only itself. The
model is a random one with room for 40,000 tokens, so that the example runs anywhere.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpool.transformers import PagedCache

QUESTIONS, QUESTION, ANSWER = 3, 20, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="length of the document")
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=40_000, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    document = torch.randint(3, 1000, (args.tokens,))
    room = args.tokens + QUESTIONS * (QUESTION + ANSWER) + 64
    cache = PagedCache(model, codec="int8", num_blocks=-(-room // 32), max_step_tokens=2048)

    for number in range(QUESTIONS):
        question = torch.cat([document, torch.randint(3, 1000, (QUESTION,))])[None]
        before, start = cache.cache.stats(), time.perf_counter()
        options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(question)}
        model.generate(question, cache=cache, **options)
        found = cache.cache.stats().hit_tokens - before.hit_tokens
        print(f"question {number + 1}: {found:,} tokens found, {time.perf_counter() - start:.1f} s", flush=True)
        assert found == (args.tokens if number else 0)

    held = cache.cache.stats()
    used = (held.used + held.cached) * cache.cache.plan.groups[0].bytes_per_block
    plain = args.tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    print(f"{args.tokens:,} tokens hold {used / 1e6:.1f} MB in int8; in bf16 they would hold {plain / 1e6:.1f} MB")
    assert used < 0.6 * plain


if __name__ == "__main__":
    main()
