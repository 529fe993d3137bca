"""Tiers with a codec of their own: what comes back is what that codec makes of it, and never meets other blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpool as kv

from .tiered_world import FULL, KINDS, PROMPT, World


def contents(world: World, seq: kv.Sequence) -> list[torch.Tensor]:
    return [x for layer in range(len(world.spec.layers)) for x in world.cache.read(layer, seq)]


def stored_as(codec: str, layers: Any, device_codec: str) -> list[torch.Tensor]:
    """What a cache of the device's codec holds of the prompt after a trip through another codec."""
    world = World(layers, codec=codec)
    with world.open(PROMPT) as seq:
        world.step(seq)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[device_codec]
        return [x.to(dtype).float() for x in contents(world, seq)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("codec", ["fp8", "int8", "nvfp4-token", "fp32"])
def test_what_comes_back_is_what_the_codec_makes_of_it(codec: str, backend: str) -> None:
    world = World(FULL, codec="bf16", host_size="4MiB", host_codec=codec, backend=backend)
    with world.open(PROMPT) as seq:
        world.step(seq)
        before = contents(world, seq)
    world.fill(1, 12)
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [4], "the last block is computed again"
        after = contents(world, seq)
    want = stored_as(codec, FULL, "bf16")
    whole = len(PROMPT) // 4 * 4 - 4
    for got, expected, exact in zip(after, want, before, strict=True):
        assert torch.equal(got[:whole], expected[:whole])
        assert torch.equal(got[whole:], exact[whole:]), "what was computed again is exact"
    assert torch.equal(after[0], before[0]) is (codec == "fp32")
    world.cache.check()
    world.cache.close()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_take_the_room_of_their_codec_in_host_and_directory(kind: str, tmp_path: Path) -> None:
    def held(**options: Any) -> int:
        world = World(KINDS[kind], codec="fp32", host_size="4MiB", model="m", **options)
        with world.open(PROMPT) as seq:
            world.compute(seq)
        assert world.cache.flush()
        bytes_held: int = world.stats("host").read_bytes + world.stats("host").written_bytes
        world.cache.close()
        return bytes_held

    plain, small = held(disk=tmp_path / "a"), held(disk=tmp_path / "b", host_codec="int8")
    states = kind == "recurrent"  # kept as they are
    assert small == plain if states else small < plain * 0.7
    again = World(KINDS[kind], codec="fp32", disk=tmp_path / "b", host_codec="int8", model="m")
    with again.open(PROMPT) as seq:
        assert again.step(seq)[0] < len(PROMPT)
    again.cache.check()
    again.cache.close()


def test_a_directory_of_another_codec_is_refused_by_the_names_of_the_parts(tmp_path: Path) -> None:
    def open_with(codec: str, host_codec: str | None) -> None:
        world = World(FULL, codec=codec, disk=tmp_path, model="m", host_codec=host_codec)
        try:
            with world.open(PROMPT) as seq:
                world.step(seq)
        finally:
            world.cache.close()

    open_with("bf16", "fp8")
    for codec, host_codec, parts in (
        ("bf16", None, {"block_format", "codecs", "converted_from"}),
        ("fp8", None, {"converted_from"}),  # the same bytes, but their model attended to others
        ("fp32", "fp8", {"converted_from"}),
        ("bf16", "int8", {"block_format", "codecs"}),
    ):
        with pytest.raises(kv.PlanMismatch) as raised:
            open_with(codec, host_codec)
        assert set(raised.value.fields) == parts
    open_with("bf16", "fp8")


def test_what_is_kept_is_not_converted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FULL, codec="bf16", host_size="4MiB", host_codec="fp8")
    written = []
    for _ in range(4):
        with world.open(PROMPT) as seq:
            world.step(seq)
        for number in range(12):
            with world.open([number * 1000 + i for i in range(20)]) as seq:
                world.step(seq)
        written.append(world.stats("host").written_bytes)
    assert written[1] == written[3], "all of it is below after two turns"


def test_codecs_that_tiers_cannot_have_are_refused_at_construction() -> None:
    with pytest.raises(kv.UnsupportedError, match=r"constant scales.*nvfp4-token"):
        World(FULL, host_size="4MiB", host_codec="fp8-tensor")
    with pytest.raises(kv.TierError, match="no tier to hold such blocks"):
        World(FULL, host_codec="fp8")
    with pytest.raises(kv.KVError, match="fp9"):
        World(FULL, host_size="4MiB", host_codec="fp9")
