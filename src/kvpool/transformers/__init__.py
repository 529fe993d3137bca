"""kvpool inside Hugging Face transformers: caches its models accept, and an attention function that reads them."""

from __future__ import annotations

from kvpool.transformers.attention import ATTENTION_NAME, register_attention
from kvpool.transformers.packed import PackedCache
from kvpool.transformers.paged import PagedCache

__all__ = ["ATTENTION_NAME", "PackedCache", "PagedCache", "register_attention"]
