"""Constants: what may be set, when, and what a checkpoint gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvpool.codecs import Vector, get_codec
from kvpool.errors import PlanError, PlanMismatch
from kvpool.pools.constants import (
    Constants,
    apply_scales,
    check_scale,
    differing,
    fingerprint,
    read_scales,
    set_unit_scales,
)


def constants(codec: str = "fp8-tensor", dim: int = 64, heads: int = 3, part: str = "k") -> Constants:
    return Constants(get_codec(codec), Vector((dim,)), heads, 0, part)


@pytest.mark.parametrize("bad", [0, 0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-50, 2.0**-127, 2.0**101, 1e308])
def test_a_wrong_scale_is_refused_whoever_sets_it(bad: float) -> None:
    c = constants()
    c.set(scale=0.5)
    for value in (bad, torch.tensor(bad, dtype=torch.float64)):
        with pytest.raises(PlanError, match="layer 0, k"):
            c.set(scale=value)  # type: ignore[arg-type]
    assert c.scale == 0.5


@pytest.mark.parametrize("bad", ["x", None, [0.5], torch.ones(2)])
def test_a_scale_is_one_number(bad: object) -> None:
    with pytest.raises(PlanError, match="one number"):
        check_scale(bad, "layer 0, k")  # type: ignore[arg-type]


def test_the_scale_is_the_fp32_number_that_will_be_used() -> None:
    c = constants()
    c.set(scale=0.1)
    assert c.scale == torch.tensor(0.1).item() != 0.1
    for edge in (2.0**-126, 2.0**100):
        c.set(scale=edge)
        assert c.scale == edge


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 2.0**-25, 2.0**25])
def test_a_wrong_smoothing_is_refused(bad: float) -> None:
    c, m = constants("int8"), torch.ones(3, 64)
    m[2, 63] = bad
    with pytest.raises(PlanError, match=r"2\^-24"):
        c.set(smoothing=m)
    with pytest.raises(PlanError, match="shape"):
        c.set(smoothing=torch.ones(64, 3))
    assert c.smoothing is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.full((64, 64), math.nan), "not finite"),
        (torch.eye(64) * 2.0**25, "2\\^24"),
        (torch.ones(64, 64), "condition number"),
        (torch.diag(torch.logspace(-3, 3, 64)), "condition number"),
        (torch.eye(32), "shape"),
    ],
    ids=["nan", "huge", "singular", "unequal", "small"],
)
def test_a_wrong_mixing_is_refused(values: torch.Tensor, reason: str) -> None:
    c = constants("int8")
    with pytest.raises(PlanError, match=reason):
        c.set(mixing=values, rotation=True)
    assert not c.maps
    with pytest.raises(PlanError, match="for keys alone"):
        constants("int8", part="v").set(mixing=torch.eye(64))


def test_nothing_changes_after_the_first_write() -> None:
    c = constants()
    c.set(scale=0.25, rotation=True)
    c.freeze()
    before = c.digest()
    with pytest.raises(PlanError, match="first write"):
        c.set(scale=0.5)
    assert (c.scale, c.digest()) == (0.25, before)


def test_the_first_write_needs_a_scale_where_the_codec_does() -> None:
    with pytest.raises(PlanError, match=r"set_constants.*calibrate.*unit"):
        constants().freeze()
    constants("fp8").freeze()
    c = constants()
    set_unit_scales({(0, "k"): c})
    c.freeze()
    assert c.scale == 1.0


@pytest.mark.parametrize(
    ("codec", "values", "reason"),
    [
        ("fp8", {"scale": 0.5}, "takes no constant scale"),
        ("bf16", {"smoothing": torch.ones(64)}, "quantised"),
        ("bf16", {"rotation": True}, "quantised"),
        ("bf16", {"mixing": torch.eye(64)}, "quantised"),
    ],
)
def test_a_constant_of_no_use_to_the_codec_is_refused(codec: str, values: dict, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        constants(codec).set(**values)


def test_every_constant_is_part_of_the_fingerprint() -> None:
    def table(**values: object) -> dict[tuple[int, str], Constants]:
        k, v = constants(), constants(part="v")
        k.set(scale=0.5)
        v.set(scale=0.25)
        k.set(**values)  # type: ignore[arg-type]
        return {(0, "k"): k, (0, "v"): v}

    base = table()
    m = torch.ones(3, 64)
    m[1, 5] = 2.0
    others = [table(scale=0.5000001), table(rotation=True), table(smoothing=torch.ones(64)), table(smoothing=m)]
    others += [table(mixing=torch.eye(64)), table(mixing=torch.eye(64), rotation=True)]
    swapped = {(0, "k"): base[0, "v"], (0, "v"): base[0, "k"]}
    assert fingerprint(base) == fingerprint(table())
    assert len({fingerprint(t) for t in (base, *others, swapped)}) == 8
    assert differing(base, others[1]) == ("layer 0, k",)
    assert differing(base, table()) == ()


def save(path: Path, **tensors: float | list[float]) -> None:
    save_file({k: torch.tensor(v) for k, v in tensors.items()}, path)


def test_scales_are_read_as_modelopt_and_llm_compressor_write_them(tmp_path: Path) -> None:
    attn = "model.layers.{}.self_attn."
    save(
        tmp_path / "model-00001-of-00002.safetensors",
        **{
            attn.format(0) + "k_proj.k_scale": 0.25,
            attn.format(0) + "v_proj.v_scale": [0.5],
            attn.format(0) + "k_proj.weight_scale": 7.0,
            attn.format(0) + "k_proj.input_scale": 7.0,
        },
    )
    save(
        tmp_path / "model-00002-of-00002.safetensors",
        **{
            attn.format(11) + "k_scale": 0.125,
            attn.format(11) + "v_scale": 2.0,
            attn.format(2) + "kv_scale": 4.0,
            attn.format(2) + "v_scale": 3.0,
        },
    )
    expected = {(0, "k"): 0.25, (0, "v"): 0.5, (11, "k"): 0.125, (11, "v"): 2.0, (2, "k"): 4.0, (2, "v"): 3.0}
    assert read_scales(tmp_path) == expected


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_wrong_scale_in_a_file_is_refused_with_its_name(tmp_path: Path, bad: float) -> None:
    save(tmp_path / "a.safetensors", **{"model.layers.3.self_attn.k_scale": bad})
    with pytest.raises(PlanError, match=r"layers\.3\.self_attn\.k_scale in a\.safetensors"):
        read_scales(tmp_path / "a.safetensors")


def test_scales_a_head_and_files_without_scales_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", **{"model.layers.3.self_attn.k_scale": [1.0, 2.0]})
    with pytest.raises(PlanError, match=r"shape \(2,\)"):
        read_scales(tmp_path)
    save(tmp_path / "a.safetensors", **{"model.layers.3.self_attn.k_proj.weight_scale": 1.0})
    with pytest.raises(PlanError, match="no k_scale"):
        read_scales(tmp_path)
    with pytest.raises(PlanError, match="no safetensors file"):
        read_scales(tmp_path / "missing")


def test_scales_go_where_they_are_needed_or_nowhere(tmp_path: Path) -> None:
    table = {
        (0, "k"): constants("fp8-tensor"),
        (0, "v"): constants("fp8"),
        (1, "latent"): constants("nvfp4"),
    }
    with pytest.raises(PlanMismatch, match="layer 1, latent") as caught:
        apply_scales(table, {(0, "k"): 0.5, (0, "v"): 0.25})
    assert caught.value.fields == ("layer 1, latent",)
    assert table[0, "k"].scale is None
    apply_scales(table, {(0, "k"): 0.5, (0, "v"): 0.25, (1, "k"): 0.125})
    assert [c.scale for c in table.values()] == [0.5, None, 0.125]
