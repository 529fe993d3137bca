"""kvpool inside Hugging Face transformers: an attention function and cache objects its models accept."""

from __future__ import annotations

from kvpool.transformers.attention import ATTENTION_NAME, register_attention
from kvpool.transformers.packed import PackedCache

__all__ = ["ATTENTION_NAME", "PackedCache", "register_attention"]
