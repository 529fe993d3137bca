"""A server with tiers below its cache."""

from __future__ import annotations

import time

import pytest
from running import GREEDY, Running

from kvpool.tiers.disk.directory import Directory

pytestmark = pytest.mark.model


def ask(server: Running, prompt: str) -> int:
    answer = server.client().completions.create(prompt=prompt, max_tokens=4, **GREEDY)
    return answer.usage.prompt_tokens_details.cached_tokens


def test_what_an_idle_server_computed_is_on_disk_before_it_stops_and_found_by_the_next(tiny_model, tokenizer, tmp_path):
    prompt = "the quick brown fox jumps over the lazy dog " * 20
    tiers = {"disk": tmp_path, "disk_size": "64MiB", "model": "tiny"}
    first = Running(tiny_model, tokenizer, tiers=tiers)
    try:
        assert ask(first, prompt) == 0
        until = time.monotonic() + 20
        stored = 0
        while not stored and time.monotonic() < until:  # a kill would lose nothing from here on
            time.sleep(0.1)
            found = Directory(tmp_path)
            stored = len(found)
            found.close()
        assert stored > 3
    finally:
        first.stop()
    assert first.engine.cache.close()
    second = Running(tiny_model, tokenizer, tiers=tiers)
    try:
        assert ask(second, prompt) >= 64
    finally:
        second.stop()
        assert second.engine.cache.close()
