"""The report of `kvpool run` names what constant scales lost."""

from __future__ import annotations

import pytest
import torch

import kvpool as kv
from kvpool.cli.run import losses
from kvpool.kinds import KVKind, LayerSpec


def written(codec: str, scale: float, backend: str) -> kv.KVCache:
    spec = kv.CacheSpec((LayerSpec((KVKind(2, 64),)),) * 2, "fp32", max_seq_len=64)
    cache = kv.KVCache(kv.make_plan(spec, codec=codec, num_blocks=4), backend=backend)
    for (layer, part), constants in cache.pools.constants.items():
        if constants.needs_scale:
            constants.set(scale=scale if (layer, part) == (1, "v") else 0.01)
    x = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    with cache.step([(cache.sequence(range(20)), 20)]) as step:
        for layer in range(2):
            cache.write(layer, step, x, x)
    return cache


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("scale", "lost"), [(1e4, "flushed"), (1e-4, "saturated")])
@pytest.mark.parametrize("codec", ["nvfp4", "int8-tensor", "fp8-tensor"])
def test_losses_are_summed_and_the_worst_part_is_named(codec: str, scale: float, lost: str, backend: str) -> None:
    if codec == "fp8-tensor" and lost == "flushed":
        scale = 1e6
    report = losses(written(codec, scale, backend))
    worst = report["worst"]
    assert (worst["layer"], worst["part"]) == (1, "v")
    assert 0 < worst[lost] <= 20 * 2 * 64
    assert worst[lost] <= report[lost]
    assert report["nonfinite"] == 0


def test_formats_with_scales_of_their_own_lose_nothing() -> None:
    assert losses(written("nvfp4-token", 1.0, "reference")) == {}
