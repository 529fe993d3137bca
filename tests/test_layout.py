"""Axis orders, strides and the one address formula."""

from __future__ import annotations

import itertools

import pytest

from kvpool.errors import PlanError
from kvpool.layout import LAYOUTS, address, inner_strides, layout

SIZES = {"F": 2, "H": 3, "N": 5, "C": 7}


def test_hnd_runs_over_tokens_first_and_nhd_over_heads() -> None:
    assert inner_strides(LAYOUTS["HND"].order, SIZES, 2) == {"C": 2, "N": 14, "H": 70, "F": 210}
    assert inner_strides(LAYOUTS["NHD"].order, SIZES, 2) == {"C": 2, "H": 14, "N": 42, "F": 210}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_begins_with_the_block_and_ends_with_the_container(name: str) -> None:
    found = layout(name)
    assert sorted(found.order) == sorted("BLFHNC")
    assert found.order[0] == "B"
    assert found.order[-1] == "C"
    assert found.vector_order == "BLFHN"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_has_an_address_of_its_own_without_gaps(name: str) -> None:
    strides = inner_strides(LAYOUTS[name].order, SIZES, 4)
    seen = {
        address(100, index, [strides[axis] for axis in SIZES])
        for index in itertools.product(*(range(n) for n in SIZES.values()))
    }
    assert seen == set(range(100, 100 + 4 * 2 * 3 * 5 * 7, 4))


def test_addresses_are_exact_far_beyond_32_bits() -> None:
    assert address(0, (3_999_999, 575), (576 * 2, 2)) == 4_607_999_998
    assert address(2**40, (2**31 - 1,), (2**31,)) == 2**40 + (2**31 - 1) * 2**31


def test_an_unknown_layout_and_a_wrong_number_of_indices_are_refused() -> None:
    with pytest.raises(PlanError, match="unknown layout 'HDN'; known: HND, NHD"):
        layout("HDN")
    with pytest.raises(PlanError, match="2 indices for 1 strides"):
        address(0, (1, 2), (3,))
