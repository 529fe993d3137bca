"""Bytes of every codec, on all bf16 values, against the definitions in plain numpy."""

from __future__ import annotations

import codec_definitions as define
import numpy as np
import pytest
import torch

from kvpool.codecs import CODECS, Codec, Vector, get_codec

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
SCALES = [1.0, 2.0**-7, 0.0371, 3.3, 448.0, 1e-4, 1e4, 2.0**-126, 2.0**100]
HEADS = [Vector((64,)), Vector((128, 128, 64)), Vector((32,) * 5)]


def compare(codec: Codec, x: torch.Tensor, vector: Vector, scale: float | None = None) -> None:
    """Assert that codec and definition give the same planes, NaN scales included, and that both decode the same."""
    got = codec.encode(x, vector, scale)
    want = define.encode(codec.name, x.float().numpy(), vector.segments, scale)
    assert got.keys() == want.keys()
    for name, plane in got.items():
        mine = (plane.view(torch.uint16) if plane.dtype == torch.bfloat16 else plane).numpy()
        theirs = want[name].reshape(mine.shape)
        different = mine.view(np.uint8) != theirs.view(np.uint8)
        assert mine.dtype == theirs.dtype
        assert not different.any(), f"{name}: {different.sum()} bytes differ, first {np.argwhere(different)[0]}"


def magnitudes(seed: int, dim: int) -> torch.Tensor:
    """All finite bf16 values in vectors of similar magnitude, shuffled inside a window, `[n, dim]`."""
    rng = np.random.default_rng(seed)
    values = ALL_BF16[ALL_BF16.float().isfinite()]
    order = np.argsort(values.float().abs().numpy() * 2.0 ** rng.uniform(-3, 3, len(values)), kind="stable")
    order = order[: len(order) // dim * dim]
    return values[torch.from_numpy(order)].reshape(-1, dim)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", [n for n in CODECS if get_codec(n).constant_scale])
def test_constant_scale_bytes_of_every_bf16_value(name: str, scale: float) -> None:
    compare(get_codec(name), ALL_BF16.reshape(-1, 64), Vector((64,)), scale)
    compare(get_codec(name), magnitudes(0, 64), Vector((64,)), scale)


@pytest.mark.parametrize("vector", HEADS, ids=lambda v: "x".join(map(str, v.segments)))
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", [n for n in CODECS if not get_codec(n).constant_scale])
def test_own_scale_bytes_of_every_bf16_value(name: str, seed: int, vector: Vector) -> None:
    compare(get_codec(name), magnitudes(seed, vector.dim), vector)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_normal_vectors_in_fp32(name: str) -> None:
    codec = get_codec(name)
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(7)) * 3
    compare(codec, x, Vector((128,)), 0.0371 if codec.constant_scale else None)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_vectors_with_nan_and_infinities(name: str) -> None:
    codec, vector = get_codec(name), Vector((128, 64))
    x = torch.randn(64, 192, generator=torch.Generator().manual_seed(8))
    x[torch.arange(48), torch.arange(48) * 4] = torch.tensor([np.nan, np.inf, -np.inf]).repeat(16)
    x[48:52] = 0
    x[52] = np.nan
    if name in ("fp32", "fp16", "bf16"):  # NaN payloads are nobody's promise
        assert torch.equal(codec.decode(codec.encode(x, vector), vector).isnan(), x.isnan())
    else:
        compare(codec, x, vector, 0.0371 if codec.constant_scale else None)


@pytest.mark.parametrize("name", CODECS)
def test_decode_is_one_multiplication_of_code_and_scale(name: str) -> None:
    codec, vector = get_codec(name), Vector((128, 64))
    scale = 0.0371 if codec.constant_scale else None
    x = torch.randn(500, 192, generator=torch.Generator().manual_seed(9))
    planes = codec.encode(x, vector, scale)
    got = codec.decode(planes, vector, scale).numpy()
    data = planes["data"].float().numpy() if name in ("fp32", "fp16", "bf16", "int8", "int8-tensor") else None
    if data is None:
        raw = planes["data"].numpy()
        if raw.shape[-1] != 192:
            codes = np.stack([raw & 15, raw >> 4], -1).reshape(-1, 192)
            data = np.concatenate([define.E2M1, -define.E2M1]).astype(np.float32)[codes]
        else:
            values = define.E5M2 if "e5m2" in name else define.E4M3
            data = (values[raw & 0x7F] * np.where(raw & 0x80, -1, 1)).astype(np.float32)
    want = data
    if "block_scale" in planes:
        raw = planes["block_scale"].numpy()
        if name == "index-fp4":
            bs = (2.0 ** (raw.astype(np.float64) - 127)).astype(np.float32)
        else:
            g = planes["scale"].numpy()[:, None] if "scale" in planes else np.float32(scale)
            bs = define.E4M3[raw].astype(np.float32) * g
        want = data * np.repeat(bs, 192 // raw.shape[-1], -1)
    elif "scale" in planes:
        want = data * np.repeat(planes["scale"].numpy(), vector.segments, -1)
    elif scale is not None:
        want = data * np.float32(scale)
    assert np.array_equal(got, want)
    assert got.dtype == want.dtype == np.float32
