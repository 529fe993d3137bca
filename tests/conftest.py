"""Options of the test suite."""

from __future__ import annotations

import os

import pytest

# Triton is interpreted or compiled for the life of a process, from its first import; tests/triton compiles in its own.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storm-seed", type=int, default=None, help="seed of tests/storm, as a failure printed it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first: short ones are left for the end, so that no worker waits for another then."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded model's tokenizer."""
    from transformers import AutoTokenizer

    from kvpool.engine.embedded import embedded_model_dir

    return AutoTokenizer.from_pretrained(embedded_model_dir("bf16", notify=lambda text: None))


@pytest.fixture(scope="session")
def tiny_model(tokenizer):
    """A random two-layer llama with the embedded model's vocabulary, fp32; it never ends an answer by itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()
