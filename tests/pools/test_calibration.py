"""Constants measured on a sample, through the cache's own methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvpool as kv
from kvpool.codecs import Counts, Vector, get_codec
from kvpool.codecs.maps import Maps, Mixing
from kvpool.kinds import KVKind, LatentKind, LayerSpec
from kvpool.pools.calibration import mixing_from, smoothing_from

H, D, T = 2, 64, 40


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache(codec: object, kind: object = None, **options: object) -> kv.KVCache:
    spec = kv.CacheSpec((LayerSpec((kind or KVKind(H, D),)),) * 2)
    plan = kv.make_plan(spec, 1 << 20, codec=codec, tokens_per_block=16)
    return kv.KVCache(plan, backend="reference", **options)


def stored(c: kv.KVCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sequence = c.sequence(range(len(k)))
    with c.step([(sequence, len(k))]) as step:
        c.write(layer, step, k, v)
    return c.read(layer, sequence)


def error(back: torch.Tensor, x: torch.Tensor) -> float:
    return float((back - x).norm() / x.norm())


@pytest.mark.parametrize("codec", ["fp8-tensor", "fp8e5m2-tensor", "int8-tensor", "nvfp4"])
@pytest.mark.parametrize("rotation", [None, True])
@pytest.mark.parametrize("smoothing", [False, True])
def test_calibrated_constants_lose_nothing_of_the_sample(codec: str, rotation: bool | None, smoothing: bool) -> None:
    c = cache(codec)
    k, v = normal(T, H, D) * 7, normal(T, H, D, seed=1) * 0.3
    k[:, 1, 5] += 100
    c.calibrate({1: {"k": k, "v": v}}, smoothing=smoothing, rotation=rotation)
    back_k, back_v = stored(c, 1, k, v)
    bound = {"int8-tensor": 0.04, "fp8e5m2-tensor": 0.06, "nvfp4": 0.12}.get(codec, 0.03)
    assert error(back_k, k) < bound
    assert error(back_v, v) < bound
    for part in ("k", "v"):
        constants = c.pools.part(1, part).constants
        assert constants.counts.saturated == 0
        assert constants.rotation is bool(rotation)
        assert (constants.smoothing is not None) is (smoothing and part == "k")
    assert c.pools.part(1, "k").constants.scale != c.pools.part(1, "v").constants.scale


def test_a_layer_that_was_not_calibrated_refuses_the_write() -> None:
    c = cache("int8-tensor")
    k = normal(T, H, D)
    c.calibrate({1: {"k": k, "v": k}})
    sequence = c.sequence(range(T))
    with pytest.raises(kv.PlanError, match="layer 0, k"), c.step([(sequence, T)]) as step:
        c.write(0, step, k, k)


def test_codecs_without_a_constant_take_smoothing_and_rotation_only() -> None:
    c = cache({"k": "nvfp4-token", "v": "bf16"})
    k, v = normal(T, H, D), normal(T, H, D, seed=1)
    k[:, :, 3] += 50
    c.calibrate({0: {"k": k, "v": v}}, smoothing=True, rotation=True)
    key, value = c.pools.part(0, "k").constants, c.pools.part(0, "v").constants
    assert key.scale is None
    assert value.scale is None
    assert key.rotation
    assert not value.rotation
    assert key.smoothing is not None
    assert value.smoothing is None
    back, _ = stored(c, 0, k, v)
    assert error(back, k) < 0.12


@pytest.mark.parametrize("bad", ["empty", "zero", "nan"])
def test_a_useless_sample_is_refused(bad: str) -> None:
    x = {"empty": torch.empty(0, H, D), "zero": torch.zeros(T, H, D), "nan": normal(T, H, D)}[bad]
    if bad == "nan":
        x[3, 1, 7] = torch.nan
    with pytest.raises(kv.PlanError, match="calibration sample of layer 0, k"):
        cache("fp8-tensor").calibrate({0: {"k": x}})


def test_channels_come_out_equally_large_and_a_silent_one_is_not_blown_up() -> None:
    x = normal(500, H, D) * torch.logspace(-0.5, 2, D)
    x[:, 0, 7] = 0
    m = smoothing_from(x)
    amax = (x / m).abs().amax(0)
    loud = torch.ones(H, D, dtype=torch.bool)
    loud[0, 7] = False
    for head in range(H):
        assert amax[head][loud[head]].max() / amax[head][loud[head]].min() < 1.01
    assert (amax[0, 7], bool(m[0, 7] > 0)) == (0, True)
    assert (m.log().mean(-1).abs() < 1e-4).all()


def test_with_queries_smoothing_gives_keys_and_queries_the_same_shape() -> None:
    spread = torch.logspace(-1, 1, D)
    k, q = normal(500, H, D) * spread, normal(500, 3 * H, D, seed=1) * spread.flip(0)
    k[0] *= 1000  # a token that all attend to must not decide
    m = smoothing_from(k, q)
    stored = (k[1:] / m).abs().mean(0)
    asked = (q * m.repeat_interleave(3, 0)).abs().reshape(500, H, 3, D).mean((0, 2))
    ratio = stored / asked
    assert ratio.max() / ratio.min() < 20  # of 10,000 before
    assert (m.log().mean(-1).abs() < 1e-4).all()


def alike(n: int, directions: int, heads: int = H, seed: int = 0) -> torch.Tensor:
    """Vectors `[n, heads, D]` whose channels vary together: a few directions, and little beside them."""
    basis = normal(directions, D, seed=99)
    return normal(n, heads, directions, seed=seed) @ basis + 0.1 * normal(n, heads, D, seed=seed + 1)


def moments(x: torch.Tensor) -> torch.Tensor:
    """Second moments `[H, D, D]` of `[T, H * group, D]`."""
    y = x.reshape(len(x), H, -1, D).transpose(0, 1).flatten(1, 2)
    return y.mT @ y / y.shape[1]


def test_mixing_makes_keys_and_queries_alike_in_every_direction() -> None:
    k, q = alike(800, 5), normal(800, 2 * H, D, seed=4) * torch.logspace(-1, 1, D)
    maps = Maps(mixing=Mixing.of(mixing_from(k, q), 0))
    stored, asked = moments(maps.store(k)), moments(maps.ask(q))
    assert (stored - asked).norm() < 0.1 * stored.norm()
    assert (moments(k) - moments(q)).norm() > 0.9 * moments(k).norm()


def test_mixing_of_channels_that_do_not_vary_together_is_smoothing() -> None:
    spread = torch.logspace(-0.5, 0.5, D)
    k, q = normal(20_000, H, D) * spread, normal(20_000, H, D, seed=1) * spread.flip(0)
    matrix, m = mixing_from(k, q)[0], smoothing_from(k, q)[0]
    matrix = matrix / matrix.diagonal().log().mean().exp()
    assert (matrix - torch.diag(m)).norm() < 0.05 * m.norm()


def test_mixing_lessens_the_logits_error_of_4_bit_keys_whose_channels_vary_together() -> None:
    k, q = alike(500, 6), alike(500, 40, 3 * H, seed=7)
    codec, vector = get_codec("nvfp4-token"), Vector((D,))
    errors = {}
    for name in ("smoothing", "mixing"):
        c = cache("nvfp4-token")
        c.calibrate({0: {"k": k[:300], "v": k[:300], "q": q[:300]}}, **{name: True}, rotation=True)
        maps = c.pools.part(0, "k").constants.maps
        held = codec.decode(codec.encode(maps.store(k), vector), vector)
        error = torch.einsum("qhgd,thd->hgqt", maps.ask(q).reshape(500, H, 3, D), held - maps.store(k))
        errors[name] = float(error.square().mean().sqrt())
    assert errors["mixing"] < 0.7 * errors["smoothing"], errors


def test_mixing_needs_queries_and_takes_the_place_of_smoothing() -> None:
    c = cache("int8")
    k = normal(T, H, D)
    with pytest.raises(kv.PlanError, match="give q of the same text"):
        c.calibrate({0: {"k": k}}, mixing=True)
    with pytest.raises(kv.PlanError, match="give one of them"):
        c.calibrate({0: {"k": k, "q": k}}, mixing=True, smoothing=True)
    assert not c.pools.part(0, "k").constants.maps
    with pytest.raises(kv.PlanError, match="is a value as well"):
        cache("int8", LatentKind(64, 32)).calibrate({0: {"latent": normal(T, 1, 64)}}, mixing=True)


def test_a_latent_in_two_parts_takes_its_queries_in_order() -> None:
    c = cache({"latent": "int8", "rope": "fp8"}, LatentKind(64, 32))
    latent, rope = normal(T, 1, 64), normal(T, 1, 32, seed=1)
    q = torch.cat([torch.full((T, 4, 64), 1.0), torch.full((T, 4, 32), 4.0)], -1)
    q[..., 3], q[..., 64 + 5] = 16.0, 64.0
    c.calibrate({0: {"rope": rope, "q": q, "latent": latent}}, smoothing=True)
    for name, channel, x in (("latent", 3, latent), ("rope", 5, rope)):
        m = c.pools.part(0, name).constants.smoothing
        assert m is not None
        want = (x.abs().mean(0) / torch.ones(x.shape[-1]).index_fill(0, torch.tensor([channel]), 16.0)).sqrt()
        want = want / want.log().mean().exp()
        assert torch.allclose(m, want, rtol=1e-4)


def test_one_call_sets_a_layer_and_names_what_does_not_exist() -> None:
    c = cache({"k": "fp8-tensor", "v": "nvfp4"})
    m = torch.full((H, D), 2.0)
    c.set_constants(0, k=0.25, v=0.5, smoothing=m, rotation=True)
    key, value = c.pools.part(0, "k").constants, c.pools.part(0, "v").constants
    assert (key.scale, value.scale, key.rotation, value.rotation) == (0.25, 0.5, True, True)
    assert torch.equal(key.smoothing, m)
    assert value.smoothing is None
    c.set_constants(0, rotation={"v": False})
    assert (key.rotation, value.rotation) == (True, False)
    with pytest.raises(kv.PlanError, match="no 'latent'; it stores k, v"):
        c.set_constants(0, latent=0.5)


def test_a_latent_takes_its_constants_under_its_own_name() -> None:
    c = cache("fp8-tensor", LatentKind(64, 32))
    c.set_constants(1, latent=0.125, smoothing=torch.full((96,), 0.5), rotation=True)
    latent = c.pools.part(1, "latent").constants
    assert (latent.scale, latent.maps.block) == (0.125, 32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("codec", "scale"), [("int8-tensor", 0.01), ("fp8-tensor", 1e-3), ("nvfp4", 1e-4), ("nvfp4", 1e4)]
)
def test_every_backend_counts_what_a_scale_loses(backend: str, codec: str, scale: float) -> None:
    spec = kv.CacheSpec((LayerSpec((KVKind(H, D),)),) * 2)
    c = kv.KVCache(kv.make_plan(spec, 1 << 20, codec={"k": codec, "v": "fp8"}, tokens_per_block=16), backend=backend)
    c.set_constants(1, k=scale)
    k = normal(T, H, D)
    k[3, 1] = torch.nan
    stored(c, 1, k, k)
    lost = c.lost()
    assert set(lost) == {(0, "k"), (1, "k")}
    got = lost[1, "k"]
    want = Counts()
    get_codec(codec).encode(k, Vector((D,)), scale, want)
    assert got == want
    assert got.saturated + got.flushed > 0
    assert got.nonfinite == (D if codec == "int8-tensor" else 0)
    assert lost[0, "k"] == Counts()


def test_scales_come_by_name_by_checkpoint_or_by_mapping(tmp_path: Path) -> None:
    c = cache("fp8-tensor", scales="unit")
    assert {x.scale for x in c.pools.constants.values()} == {1.0}
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"]
    save_file({n: torch.tensor(0.5 + i) for i, n in enumerate(names)}, tmp_path / "model.safetensors")
    c.set_scales(tmp_path)
    assert [x.scale for x in c.pools.constants.values()] == [0.5, 1.5, 2.5, 3.5]
    c.set_scales({(0, "k"): 2.0, (0, "v"): 3.0, (1, "k"): 4.0, (1, "v"): 5.0})
    assert [x.scale for x in c.pools.constants.values()] == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(kv.PlanMismatch, match="layer 1, k"):
        c.set_scales({(0, "k"): 2.0, (0, "v"): 3.0})
