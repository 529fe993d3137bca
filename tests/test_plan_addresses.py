"""Addresses: the sum of named products, exact beyond 32 bits."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.errors import PlanError
from kvpool.kinds import KVKind, LatentKind
from kvpool.layout import LAYOUTS
from kvpool.plan import make_plan
from model_data import uniform


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["bf16", "fp8", "nvfp4", "nvfp4-token", "int8"])
def test_an_address_is_the_sum_of_its_named_products(codec: str, layout: str) -> None:
    plan = make_plan(uniform(KVKind(3, 32), 4), "8MiB", codec=codec, layout=layout, tokens_per_block=16)
    found = plan.address(block=7, layer=3, part="v", head=2, token=5, dim=19)
    group, pool, layer, factor = plan.find(3, "v")
    data = pool.plane("data")
    codes = 2 if "nvfp4" in codec else 1
    assert (group, layer, factor) == (0, 3, 1)
    assert [term.axis for term in found.data.terms] == list(data.order)
    index = dict(zip("BLFHNC", (7, 3, 1, 2, 5, 19 // codes), strict=True))
    strides = dict(zip("BLFHNC", data.strides, strict=True))
    assert found.offset == data.offset + sum(index[axis] * strides[axis] for axis in "BLFHNC")
    assert found.data.nibble == (1 if codes == 2 else None)
    assert [plane.plane for plane in found.scales] == [plane.name for plane in pool.planes[1:]]
    for place, plane in zip(found.scales, pool.planes[1:], strict=True):
        container = {} if len(plane.shape) == 5 else {"C": 19 // 16}
        want = plane.offset + sum(
            {**index, **container}[axis] * stride for axis, stride in zip("BLFHNC", plane.strides, strict=False)
        )
        assert place.offset == want
    assert f"= {found.offset}" in str(found)


def test_a_latent_has_one_scale_for_128_channels_and_one_for_the_rope_part() -> None:
    plan = make_plan(uniform(LatentKind(512, 64)), "8MiB", codec="fp8")
    bases = [plan.address(0, 0, "latent", dim=dim).scales[0].offset for dim in (0, 127, 128, 511, 512, 575)]
    assert [b - bases[0] for b in bases] == [0, 0, 4, 12, 16, 16]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"block": 10**9}, "block must be between 0 and"),
        ({"block": -1}, "block"),
        ({"layer": 2}, "layer 2 does not exist"),
        ({"part": "latent"}, "stores no 'latent'; it stores k, v"),
        ({"head": 2}, "head must be between 0 and 1"),
        ({"token": 32}, "token must be between 0 and 31"),
        ({"dim": 64}, "dim must be between 0 and 63"),
    ],
)
def test_indices_out_of_range_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make_plan(uniform(), "1GiB").address(**{"block": 0, "layer": 0, "part": "k", **arguments})


def test_sizes_and_addresses_are_exact_above_two_to_the_31() -> None:
    plan = make_plan(uniform(KVKind(8, 128), 80), "512GiB", codec="bf16")
    (group,) = plan.groups
    last = plan.address(group.num_blocks - 1, 79, "v", 7, 31, 127)
    assert last.offset == group.num_blocks * group.bytes_per_block - 2
    assert last.offset > 2**38
    assert 80 * 32768 * 8 * 128 == 2_684_354_560
    assert (
        make_plan(uniform(KVKind(8, 128), 80), max_tokens=32768, max_seq_len=32768).used_bytes == 2 * 2 * 2_684_354_560
    )
