"""Smoothing, rotation and mixing: exact in what they promise, and worth it where channels are unlike or alike."""

from __future__ import annotations

import codec_definitions as define
import numpy as np
import pytest
import torch

from kvpool.codecs import Vector, get_codec
from kvpool.codecs.maps import Maps, Mixing, rotate, rotation_block
from kvpool.errors import PlanError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [32, 64, 128, 512])
def test_rotation_is_multiplication_by_the_normalised_hadamard_matrix(block: int) -> None:
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    x = normal(5, 3 * block)
    want = (x.double().numpy().reshape(-1, block) @ h / np.sqrt(block)).reshape(x.shape)
    assert np.abs(rotate(x, block).numpy() - want).max() < 1e-5
    assert (rotate(rotate(x, block), block) - x).abs().max() < 1e-5


@pytest.mark.parametrize(("heads", "dim", "block"), [(2, 64, 64), (3, 96, 32), (1, 576, 64)])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("turn", [False, True])
def test_what_is_stored_agrees_with_the_definition_to_the_bit(
    heads: int, dim: int, block: int, smooth: bool, turn: bool
) -> None:
    x = (normal(40, heads, dim) * 3).bfloat16()
    m = normal(heads, dim, seed=1).abs() + 0.1 if smooth else None
    got = Maps(m, block if turn else 0).store(x)
    want = define.mapped(x.float().numpy(), None if m is None else m.numpy(), block if turn else 0)
    assert np.array_equal(got.numpy().view(np.uint32), want.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("turn", [False, True])
def test_what_is_stored_with_mixing_agrees_with_the_definition_to_the_bit(turn: bool) -> None:
    heads, dim = 3, 96
    x = (normal(40, heads, dim) * 3).bfloat16()
    maps = Maps(mixing=Mixing.of(mixed(heads, dim), 32 if turn else 0))
    want = define.multiplied(x.float().numpy(), maps.mixing.store.numpy())
    assert np.array_equal(maps.store(x).numpy().view(np.uint32), want.view(np.uint32))


def mixed(heads: int, dim: int, seed: int = 3) -> torch.Tensor:
    return torch.eye(dim) + 0.4 * normal(heads, dim, dim, seed=seed) / dim**0.5


def test_a_mixing_matrix_and_the_rotation_behind_it_are_one_product() -> None:
    m = mixed(2, 64)
    x = normal(9, 2, 64)
    want = rotate(torch.einsum("nhd,hde->nhe", x.double(), m.double().inverse()).float(), 32)
    assert (Maps(mixing=Mixing.of(m, 32)).store(x) - want).abs().max() < 1e-5


@pytest.mark.parametrize("group", [1, 3])
def test_dot_products_and_restored_vectors_are_those_of_the_originals(group: int) -> None:
    heads, dim = 2, 96
    k, q = normal(7, heads, dim), normal(5, heads * group, dim, seed=1)
    m = normal(heads, dim, seed=2).abs() + 0.1
    every = [Maps(m), Maps(block=32), Maps(m, 32)]
    every += [Maps(mixing=Mixing.of(mixed(heads, dim), block)) for block in (0, 32)]
    for maps in every:
        stored, asked = maps.store(k), maps.ask(q)
        want = torch.einsum("qhd,nhd->hqn", q, k.repeat_interleave(group, 1))
        got = torch.einsum("qhd,nhd->hqn", asked, stored.repeat_interleave(group, 1))
        assert (got - want).abs().max() < 1e-4
        assert (maps.restore(stored) - k).abs().max() < 1e-5


def test_the_value_part_of_a_rotated_latent_is_restored_alone() -> None:
    latent = Vector((128, 128, 64))
    x = normal(9, 1, latent.dim)
    block = rotation_block(latent)
    assert block == 64
    stored = rotate(x, block)
    assert (rotate(stored[..., :256], block) - x[..., :256]).abs().max() < 1e-5


def test_a_segment_too_odd_to_rotate_is_refused_although_the_whole_is_not() -> None:
    assert rotation_block(Vector((96, 32))) == 32
    with pytest.raises(PlanError, match="segments of"):
        rotation_block(Vector((112, 16)))


def test_huge_finite_vectors_stay_finite_and_infinities_stay_bad() -> None:
    x = torch.full((3, 1, 128), 3e38)
    x[2, 0, 5] = torch.inf
    m = torch.full((1, 128), 2.0**-24)
    mixing = Mixing.of(mixed(1, 128) * 2.0**-24, 128)
    for maps in (Maps(m), Maps(block=128), Maps(m, 128), Maps(mixing=mixing)):
        stored = maps.store(x)
        assert stored[:2].isfinite().all()
        assert not stored[2].isfinite().all()


#: Error of keys with outlier channels over that of keys without, by format, none of the two maps applied.
OUTLIERS = {"int8": 0.0070, "nvfp4-token": 0.10, "index-fp4": 0.12, "fp8": 0.0265}


def keys_with_outliers(n: int = 2048, heads: int = 2, dim: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys like Qwen2's: four channels of every head with a large bias. Returns (keys, the same without)."""
    plain = normal(n, heads, dim)
    keys = plain.clone()
    keys[:, :, [3, 40, 77, 120]] += torch.tensor([60.0, -40.0, 90.0, 30.0])
    return keys, plain


def small_channel_error(codec_name: str, x: torch.Tensor, smoothing: torch.Tensor | None, block: int) -> float:
    """Relative error of the channels that are no outliers."""
    codec, vector = get_codec(codec_name), Vector((x.shape[-1],))
    maps = Maps(smoothing, block)
    back = maps.restore(codec.decode(codec.encode(maps.store(x), vector), vector))
    small = [d for d in range(x.shape[-1]) if d not in (3, 40, 77, 120)]
    return float((back - x)[..., small].norm() / x[..., small].norm())


@pytest.mark.parametrize("name", ["int8", "nvfp4-token", "index-fp4"])
def test_smoothing_restores_keys_with_outlier_channels(name: str) -> None:
    keys, plain = keys_with_outliers()
    without = small_channel_error(name, plain, None, 0)
    lost = small_channel_error(name, keys, None, 0)
    smoothing = keys.abs().amax(0)
    restored = small_channel_error(name, keys, smoothing / smoothing.log().mean().exp(), 0)
    assert lost > 2 * without
    assert restored <= 1.5 * without, (without, lost, restored)
