"""Several conversations share one system prompt and one cache: `python examples/long_chat.py`.

Every turn sends the whole conversation, as chat programs do; the cache computes what is new. The model is the embedded
SmolLM2-135M-Instruct; `--tiny` takes a random one instead, for a machine without it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpool.transformers import PagedCache

CONVERSATIONS, TURNS = 3, 4


def load(tiny: bool) -> tuple[Any, torch.Tensor, int]:
    """Return a model, the ids of a system prompt and the size of the vocabulary."""
    if tiny:
        config = LlamaConfig(
            vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval(), torch.randint(3, 1000, (200,)), 1000
    from kvpool.cli.run import SYSTEM_PROMPT
    from kvpool.engine.embedded import load_model

    model, tokenizer = load_model(None, "bf16", notify=print)
    return model, torch.tensor(tokenizer(SYSTEM_PROMPT).input_ids), len(tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a random model")
    model, system, vocabulary = load(parser.parse_args().tiny)
    cache = PagedCache(model, budget="256MiB")
    chats = [system] * CONVERSATIONS
    for turn in range(TURNS):
        for who, chat in enumerate(chats):
            said = torch.cat([chat, torch.randint(3, vocabulary, (20,))])[None]  # a question of 20 tokens
            hits, start = cache.cache.stats().hit_tokens, time.perf_counter()
            answer = model.generate(
                said, attention_mask=torch.ones_like(said), cache=cache, max_new_tokens=30, do_sample=False
            )
            chats[who] = answer[0]
            found = cache.cache.stats().hit_tokens - hits
            print(
                f"turn {turn + 1}, chat {who + 1}: {said.shape[1]} tokens of prompt, {found} found,"
                f" {time.perf_counter() - start:.2f} s"
            )
    print(cache.cache.stats())


if __name__ == "__main__":
    main()
