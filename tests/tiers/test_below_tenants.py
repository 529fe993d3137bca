"""Whose blocks are whose in the tiers below a cache: salts, plans, models, constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec

from .tiered_world import PROMPT, WINDOW, World


def test_salts_stay_apart_in_every_tier(tmp_path: Path) -> None:
    """Report i18: the same tokens under another salt are never found, under the same salt they are."""
    world = World(host_size="4MiB", disk=tmp_path, model="m")
    for salt in ("a", "b", None):
        with world.open(PROMPT, salt=salt) as seq:
            assert world.step(seq, salt=salt) == [40]
    assert world.cache.close()
    again = World(host_size="4MiB", disk=tmp_path, model="m")
    for salt, computed in (("a", 4), ("c", 40), ("b", 4), (None, 4)):
        with again.open(PROMPT, salt=salt) as seq:
            assert again.step(seq, salt=salt) == [computed]
            again.verify(seq, salt=salt)
    again.cache.close()


def test_clearing_a_salt_clears_it_in_every_tier_for_good(tmp_path: Path) -> None:
    world = World(host_size="4MiB", disk=tmp_path, model="m")
    for salt in ("a", "b", None):
        with world.open(PROMPT, salt=salt) as seq:
            world.step(seq, salt=salt)
    assert world.cache.flush()
    world.cache.clear("a")
    for reopen in (True, False):  # on disk first, then beside what the host has
        if reopen:
            assert world.cache.close()
            world = World(host_size="4MiB", disk=tmp_path, model="m")
        else:
            world.cache.clear("a")
        for salt, computed in (("b", 4), (None, 4), ("a", 40)):
            with world.open(PROMPT, salt=salt) as seq:
                assert world.step(seq, salt=salt)[0] in ({40} if computed == 40 else {1, 4})
                world.verify(seq, salt=salt)
    world.open(PROMPT).release()
    world.cache.clear()
    with world.open(PROMPT, salt="b") as seq:
        assert world.step(seq, salt="b") == [40]
    world.cache.close()


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"model": "other"}, {"model"}),
        ({"codec": "bf16"}, {"block_format", "codecs"}),
        ({"layers": (LayerSpec((KVKind(3, 32),)),)}, {"block_format", "constants", "groups"}),
        ({"layers": WINDOW}, {"block_format", "groups"}),
        ({"layers": (LayerSpec((KVKind(3, 64),)),) * 2}, {"block_format", "groups"}),
    ],
    ids=["model", "codec", "fewer layers", "windows", "wider heads"],
)
def test_a_directory_of_another_plan_or_model_is_refused_by_the_names_of_the_parts(
    tmp_path: Path, change: dict[str, Any], fields: set[str]
) -> None:
    """Reports i05 and i06: pages of another model's weights, of another format, layout, page size or window."""
    world = World(disk=tmp_path, model="m")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.cache.close()
    other = World(**{"disk": tmp_path, "model": "m", **change})
    with pytest.raises(kv.PlanMismatch) as raised:
        other.open(PROMPT)
    assert set(raised.value.fields) == fields


def test_rotated_and_plain_caches_never_exchange_blocks(tmp_path: Path) -> None:
    """Report i14: the transform is part of what a block depends on."""
    world = World(disk=tmp_path, model="m", codec="int8")
    world.cache.set_constants(0, rotation=True)
    world.open(PROMPT).release()
    with pytest.raises(kv.PlanError, match="frozen"):
        world.cache.set_constants(1, rotation=True)
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.cache.close()
    plain = World(disk=tmp_path, model="m", codec="int8")
    with pytest.raises(kv.PlanMismatch) as raised:
        plain.open(PROMPT)
    assert raised.value.fields == ("constants",)
