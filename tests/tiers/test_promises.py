"""A step takes what `fits` said, whichever blocks of a slow tier have come by then."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvpool.kinds import LayerSpec
from kvpool.sequence import Sequence

from .test_below_faults import slow_reads
from .tiered_world import FULL, PROMPT, WINDOW, World

LONGER = [*range(44), 7]
LARGE = list(range(1000, 1081))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds what a first process computed: more than the prompt, and another; nothing read from it is ever late."""
    monkeypatch.setattr("kvpool.tiers.transfer.LATENCY_S", 60.0)
    return tmp_path


def stored(path: Path, layers: tuple[LayerSpec, ...]) -> None:
    world = World(layers, num_blocks=80, disk=path, model="m")
    for tokens in (range(60), LARGE):
        with world.open(list(tokens)) as seq:
            world.step(seq)
    assert world.cache.close()


def verified_and_closed(world: World, seqs: list[Sequence], release: threading.Event) -> None:
    for seq in seqs:
        world.verify(seq)
        seq.release()
    release.set()
    world.cache.check()
    assert world.cache.close()


def sharers(world: World) -> list[Sequence]:
    """One that waits for a block of the disk, and six that are cheap only while it holds the prompt's last block.

    The first of the six ends within that block. Beside one that holds it, it copies it; alone it takes it over, and
    then each of the five behind it copies it.
    """
    prompts = [LONGER, [*PROMPT[:38], 7], *([*PROMPT, 100 + i] for i in range(5))]
    return [world.open(tokens) for tokens in prompts]


def test_one_that_is_left_out_is_computed_where_others_count_on_what_it_holds(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(disk, FULL)
    world = World(FULL, num_blocks=18, disk=disk, model="m")
    with world.open(PROMPT, max_cached_tokens=0) as seq:
        world.step(seq)
    release = slow_reads(monkeypatch, 60)
    seqs = sharers(world)
    assert world.cache.fits([(seq, 1000) for seq in seqs]) == 7
    assert world.cache.fits([(seq, 1000) for seq in seqs[1:]]) < 6, "the others fit alone: the test shows nothing"
    assert world.step(*seqs) == [5, 1, 1, 1, 1, 1, 1]
    verified_and_closed(world, seqs, release)


def test_what_has_come_is_kept_where_computing_it_needs_more_room(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window a load brings the end only; computing the prompt takes all of it within the step."""
    stored(disk, WINDOW)
    world = World(WINDOW, num_blocks=(38, 18), disk=disk, model="m")
    with world.open(PROMPT, max_cached_tokens=0) as seq:
        world.step(seq)
    large = world.open(LARGE)
    world.cache.below.wait([large.id])
    release = slow_reads(monkeypatch, 60)
    seqs = [large, *sharers(world)]
    assert world.cache.fits([(seq, 1000) for seq in seqs]) == 8
    assert world.step(*seqs) == [1, 5, 1, 1, 1, 1, 1, 1]
    verified_and_closed(world, seqs, release)
