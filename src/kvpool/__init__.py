"""kvpool: the KV cache of LLM inference as a library."""

from __future__ import annotations
