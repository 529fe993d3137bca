"""A whole cache with tiers below it: every block that comes back is read and compared with what was written."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec, Lifetime, StateKind
from kvpool.sequence import Sequence
from kvpool.tiers.directory import Directory
from storm import content

FULL = (LayerSpec((KVKind(3, 32),)),) * 2
WINDOW = (LayerSpec((KVKind(3, 32),)), LayerSpec((KVKind(2, 64),), Lifetime(window=13)))
CHUNK = (LayerSpec((KVKind(3, 32),)), LayerSpec((KVKind(3, 32),), Lifetime(chunk=24)))
SINKS = (LayerSpec((KVKind(3, 32),), Lifetime(window=9, sink_tokens=5)),)
KINDS = {"full": FULL, "window": WINDOW, "chunk": CHUNK, "sinks": SINKS}
N = 4


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a load late where a test is about something else."""
    monkeypatch.setattr("kvpool.tiers.transfer.LATENCY_S", 20.0)


class World:
    """A cache and a model that writes, for each token, what follows from its whole history."""

    def __init__(
        self, layers: tuple[LayerSpec, ...] = FULL, *, num_blocks: int = 24, codec: str = "fp32", **tiers: Any
    ) -> None:
        self.spec = kv.CacheSpec(layers=layers, dtype="fp32", max_seq_len=1024)
        options: dict[str, Any] = {"codec": codec, "tokens_per_block": N, "max_sequences": 8, "max_step_tokens": 512}
        roomy = kv.make_plan(self.spec, budget=1 << 26, **options)
        budget = sum(-(-g.bytes_per_block * num_blocks // 4096) * 4096 for g in roomy.groups)
        shares = {g.name: g.bytes_per_block for g in roomy.groups}
        total = sum(shares.values())
        self.plan = kv.make_plan(
            self.spec, budget=budget, shares={name: size / total for name, size in shares.items()}, **options
        )
        self.cache = kv.KVCache(self.plan, **{"backend": "reference", **tiers})

    def open(self, tokens: list[int], **options: Any) -> Sequence:
        return self.cache.sequence(tokens, **options)

    def links(self, seq: Sequence, salt: str | None = None) -> list[int]:
        links: list[int] = []
        content.extend(links, content.root(salt), seq.tokens)
        return links

    def vectors(self, layer: int, links: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self.spec.layers[layer].kinds[0]
        assert isinstance(kind, KVKind)
        k, v = (content.vectors(links, layer, part, kind.num_kv_heads, kind.head_dim) for part in "kv")
        return k, v

    def step(self, *seqs: Sequence, salt: str | None = None, most: int = 1000) -> list[int]:
        """Compute what is not there; returns how many tokens each sequence computed (0 when it dropped out)."""
        with self.cache.step([(seq, most) for seq in seqs]) as step:
            rows = self.write(step, *seqs, salt=salt)
        return [rows.get(seq.id, 0) for seq in seqs]

    def write(self, step: kv.Step, *seqs: Sequence, salt: str | None = None) -> dict[int, int]:
        """Write what a step computes; returns its tokens by sequence."""
        rows: dict[int, int] = {}
        links: list[int] = []
        for handle, count in zip(step.sequences, step.num_tokens.tolist(), strict=True):
            seq = next(s for s in seqs if s.id == handle)
            first = int(step.positions[len(links)])
            links += self.links(seq, salt)[first : first + count]
            rows[handle] = count
        for layer in range(len(self.spec.layers) if links else 0):
            k, v = self.vectors(layer, links)
            self.cache.write(layer, step, k, v)
        return rows

    def verify(self, seq: Sequence, salt: str | None = None) -> None:
        """Read all layers of a sequence and compare every vector it still sees."""
        links = self.links(seq, salt)[: seq.num_computed_tokens]
        for layer, spec in enumerate(self.spec.layers):
            k, v = self.cache.read(layer, seq)
            want_k, want_v = self.vectors(layer, links)
            life, n = spec.lifetime, len(links)
            token = torch.arange(n)
            seen = torch.ones(n, dtype=torch.bool)
            if life.window is not None:
                seen = (token > n - life.window) | (token < life.sink_tokens)
            if life.chunk is not None:
                seen = token >= n // life.chunk * life.chunk
            assert torch.equal(k[seen], want_k[seen])
            assert torch.equal(v[seen], want_v[seen])

    def fill(self, first: int, count: int, length: int = 20) -> None:
        """Push everything out by prompts of their own."""
        for number in range(first, first + count):
            with self.open([number * 1000 + i for i in range(length)]) as seq:
                self.step(seq)
                self.verify(seq)

    def stats(self, tier: str) -> Any:
        return self.cache.below.stats()[tier]


PROMPT = list(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back_from_the_host_bit_for_bit(kind: str) -> None:
    world = World(KINDS[kind], host_size="4MiB")
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40]
    world.fill(1, 12)
    assert world.cache.ledger.peek(PROMPT) < 36, "the device still has it: the test shows nothing"
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [4], "all whole blocks but the one of the last token come back"
        assert seq.num_cached_tokens == 36
        world.verify(seq)
    assert world.stats("host").hit > 0
    world.cache.check()
    assert world.cache.close()


@pytest.mark.parametrize("more", [[7, 8, 9], []], ids=["longer", "the same"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_process_finds_what_the_first_computed(kind: str, more: list[int], tmp_path: Path) -> None:
    tiers = {"disk": tmp_path, "model": "m"}
    with World(KINDS[kind], **tiers).cache as cache:
        world = World.__new__(World)
        world.cache, world.spec, world.plan = cache, cache.plan.spec, cache.plan
        with world.open(PROMPT) as seq:
            assert world.step(seq) == [40]
    again = World(KINDS[kind], **tiers)
    with again.open([*PROMPT, *more]) as seq:
        assert again.step(seq) == [len(more) or N], "only what is new is computed, or the last token's block"
        again.verify(seq)
    assert again.stats("disk").hit > 0
    again.cache.check()
    assert again.cache.close()


def test_a_hot_prefix_is_written_to_the_host_once() -> None:
    world = World(host_size="4MiB")
    for turn in range(5):
        with world.open(PROMPT) as seq:
            world.step(seq)
            world.verify(seq)
        written = world.stats("host").written_bytes
        world.fill(1 + 12 * turn, 12)
        if turn:
            fresh = world.stats("host").written_bytes - written
            assert fresh <= 12 * 5 * world.plan.groups[0].bytes_per_block, "blocks that were there were written again"


def test_blocks_of_low_priority_are_not_kept() -> None:
    world = World(host_size="4MiB")
    with world.open(PROMPT, retention=[kv.Retention(0, 40, priority=29)]) as seq:
        world.step(seq)
    world.fill(1, 12)
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40]


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


def test_a_paused_sequence_goes_down_and_comes_back() -> None:
    world = World(host_size="4MiB")
    seq = world.open(PROMPT)
    world.step(seq)
    seq.pause()
    world.fill(1, 12)
    assert world.cache.ledger.peek(PROMPT) < 36
    seq.resume()
    assert world.step(seq) == [4]
    world.verify(seq)
    seq.release()
    world.cache.check()


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


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    release = threading.Event()
    fetch = Directory.fetch

    def late(self: Directory, *arguments: Any) -> None:
        release.wait(seconds)
        fetch(self, *arguments)

    monkeypatch.setattr(Directory, "fetch", late)
    return release


def stored_prompt(path: Path) -> None:
    world = World(disk=path, model="m")
    with world.open(PROMPT) as seq:
        world.step(seq)
    assert world.cache.close()


def test_a_step_waits_for_a_late_disk_no_longer_than_its_deadline_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_prompt(tmp_path)
    monkeypatch.setattr("kvpool.tiers.transfer.LATENCY_S", 0.2)
    world = World(disk=tmp_path, model="m")
    release = slow_reads(monkeypatch, 30)
    begun = time.perf_counter()
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40], "late blocks are computed"
        world.verify(seq)
    assert time.perf_counter() - begun < 2
    for number in range(5):  # the disk is known to be late: nobody asks it
        begun = time.perf_counter()
        other = world.open(PROMPT[:20] + [900 + number] * 8, salt="x")
        world.cache.fits([(other, 100)])
        assert world.cache.below.transfer.disk is not None
        assert world.cache.below.transfer.disk.stats().late >= 0
        world.step(other, salt="x")
        other.release()
        assert time.perf_counter() - begun < 0.5
    release.set()
    assert world.cache.close()


def test_a_sequence_whose_blocks_are_on_their_way_lets_others_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_prompt(tmp_path)
    world = World(disk=tmp_path, model="m")
    release = slow_reads(monkeypatch, 30)
    slow, quick = world.open(PROMPT), world.open([5, 6, 7])
    begun = time.perf_counter()
    assert world.step(slow, quick) == [0, 3]
    assert time.perf_counter() - begun < 5
    release.set()
    assert world.step(slow) == [4], "it is worth waiting when nobody else can go"
    world.verify(slow)
    world.verify(quick)
    assert world.cache.below.num_deferred == 1
    slow.release()
    quick.release()
    world.cache.check()
    assert world.cache.close()


def test_a_block_that_vanishes_between_promise_and_copy_is_computed_instead() -> None:
    world = World(host_size="4MiB")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.fill(1, 12)
    onboard = world.cache.below.transfer.onboard
    calls = []

    def fail_once(blocks: Any) -> list[bool]:
        calls.append(len(blocks))
        return [False] * len(blocks) if len(calls) == 1 else onboard(blocks)

    world.cache.below.transfer.onboard = fail_once  # type: ignore[method-assign]
    with world.open(PROMPT) as seq:
        computed = world.step(seq)[0]
        assert computed > 4
        world.verify(seq)
    world.cache.check()
    world.fill(100, 3)


def test_damaged_blocks_on_disk_are_computed_and_pool_and_counters_are_as_ever(tmp_path: Path) -> None:
    """Report i12: a failed restore must not harm anybody, now or later."""
    stored_prompt(tmp_path)
    for path in tmp_path.glob("segment-*"):
        raw = bytearray(path.read_bytes())
        for at in range(8192, len(raw), 4096):
            raw[at + 100] ^= 1
        path.write_bytes(raw)
    world = World(disk=tmp_path, model="m")
    bystanders = [world.open([number] * 13) for number in (1, 2, 3)]
    world.step(*bystanders)
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [40]
        world.verify(seq)
    for bystander in bystanders:
        world.verify(bystander)
        bystander.release()
    world.cache.check()
    world.cache.close()


def test_a_host_smaller_than_a_prompt_brings_back_what_it_can(tmp_path: Path) -> None:
    world = World(disk=tmp_path, model="m", num_blocks=100)
    with world.open(list(range(300))) as seq:
        world.step(seq)
    world.cache.close()
    size = -(-world.plan.groups[0].bytes_per_block // 4096) * 4096
    small = World(disk=tmp_path, model="m", num_blocks=100, host_size=10 * size)
    with small.open(list(range(300))) as seq:
        assert small.step(seq) == [260]
        small.verify(seq)
    small.cache.check()
    small.cache.close()


def test_models_with_recurrent_states_are_refused_with_the_reason(tmp_path: Path) -> None:
    layers = (LayerSpec((KVKind(3, 32), StateKind("ssm", (4, 8), "fp32"))),)
    spec = kv.CacheSpec(layers=layers, dtype="fp32", max_seq_len=256)
    plan = kv.make_plan(spec, budget=1 << 22, tokens_per_block=N)
    for below in ({"host_size": "4MiB"}, {"disk": tmp_path, "model": "m"}):
        with pytest.raises(kv.UnsupportedError, match=r"recurrent states yet \(state\).*leave host and disk out"):
            kv.KVCache(plan, backend="reference", **below)


def test_options_that_make_no_sense_raise(tmp_path: Path) -> None:
    with pytest.raises(kv.TierError, match="give model="):
        World(disk=tmp_path)
    with pytest.raises(kv.TierError, match="there is no directory"):
        World(disk_size="1GiB")
    with pytest.raises(kv.PlanError, match="no tiers"):
        _ = World().cache.below
    with pytest.raises(kv.TierError, match="holds no block"):
        World(host_size=100).open([1])


KILLED = """
import os, sys
sys.path[:0] = [{src!r}, {tests!r}]
from tiers.test_below import PROMPT, World
world = World(disk={path!r}, model="m", host_size="1MiB")
seq = world.open(PROMPT)
world.step(seq)
if {idle}:
    assert world.cache.flush()
else:
    seq.release()
    world.fill(1, 40)
    until = __import__("time").monotonic() + 10
    while not world.cache.below.transfer.disk.idle and __import__("time").monotonic() < until: pass
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "idle", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["flushed when idle", "evicted"]
)
def test_what_was_evicted_or_flushed_before_a_kill_is_found(tmp_path: Path, idle: bool) -> None:
    root = Path(__file__).resolve().parents[2]
    script = KILLED.format(src=str(root / "src"), tests=str(root / "tests"), path=str(tmp_path), idle=idle)
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ}).returncode == -9
    world = World(disk=tmp_path, model="m")
    with world.open(PROMPT) as seq:
        assert world.step(seq) == [4]
        world.verify(seq)
    world.cache.close()


def test_the_copy_of_a_sequence_that_waits_is_restored_as_well() -> None:
    world = World(host_size="1MiB")
    with world.open(PROMPT) as seq:
        world.step(seq)
    world.fill(100, 8)  # nothing of it is left on the device
    waiting = world.open(PROMPT)
    assert world.cache.fits([(waiting, 1000)]) == 1  # asks the tiers
    copy = waiting.fork()
    assert world.step(copy) == [len(PROMPT) % N or N]
    world.verify(copy)
    copy.release()
    world.step(waiting)
    world.verify(waiting)
    waiting.release()
    world.cache.check()


def test_random_prompts_over_all_tiers_read_what_was_written(tmp_path: Path) -> None:
    storm(tmp_path, 400)


@pytest.mark.slow
def test_100000_operations_over_all_tiers_read_what_was_written(tmp_path: Path) -> None:
    storm(tmp_path, 100_000)


def change(rng: random.Random, seq: Sequence, live: list[Sequence]) -> None:
    """Pause and resume a sequence, let it grow, fork it, or take tokens back."""
    what = rng.randrange(4)
    if what == 0:
        seq.pause()
        seq.resume()
    elif what == 1:
        seq.extend([rng.randrange(5) for _ in range(rng.randrange(1, 6))])
    elif what == 2 and len(live) < 4:
        live.append(seq.fork())
    elif what == 3 and seq.num_computed_tokens > 2:
        with contextlib.suppress(kv.UnsupportedError):  # what a window saw there may be gone
            seq.rewind(rng.randrange(1, min(6, seq.num_computed_tokens)))


def resize(rng: random.Random, world: World, live: list[Sequence]) -> None:
    """Less memory, or all of it again; now and then while a step is open."""
    budget = int(world.plan.budget_bytes * rng.choice([0.5, 0.8, 1.0, 1.0]))
    ready = [seq for seq in live if seq.num_computed_tokens < len(seq)]
    if not ready or rng.random() < 0.5:
        world.cache.resize(budget)
        return
    with contextlib.suppress(kv.OutOfBlocks), world.cache.step([(ready[0], 1000)]) as step:
        assert world.cache.resize(budget).waiting
        world.write(step, ready[0])


def storm(path: Path, operations: int) -> None:
    """Open, step, fork, rewind, pause, resize, flush, close, open again; prompts share prefixes; all reads verified."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    hits = {"host": 0, "disk": 0}

    def make() -> World:
        kind = ("full", "window", "chunk")[seed % 3]
        return World(KINDS[kind], num_blocks=40, host_size="1MiB", disk=path, disk_size="16MiB", model="m")

    def close() -> None:
        for seq in live:
            seq.release()
        live.clear()
        for name in hits:
            hits[name] += world.stats(name).hit
        assert world.cache.close()

    world, live = make(), []
    for number in range(operations):
        choice = rng.random()
        if choice < 0.35 and len(live) < 4:
            stem = rng.randrange(30)
            tokens = [stem * 1000 + i for i in range(rng.randrange(1, 60))] + [rng.randrange(5) for _ in range(3)]
            live.append(world.open(tokens, salt=None))
        elif choice < 0.7 and live:
            some = rng.sample(live, rng.randrange(1, len(live) + 1))
            try:
                world.step(*some, most=rng.choice([3, 1000]))
            except kv.OutOfBlocks:
                live.pop(rng.randrange(len(live))).release()
        elif choice < 0.82 and live:
            change(rng, rng.choice(live), live)
        elif choice < 0.96 and live:
            world.verify(rng.choice(live))
            live.pop(rng.randrange(len(live))).release()
        elif choice < 0.97:
            resize(rng, world, live)
        elif choice < 0.985:
            world.cache.flush()
        elif choice < 0.99:
            close()
            world = make()
        if number % 25 == 0:
            world.cache.check()
        for seq in live:
            if rng.random() < 0.2:
                world.verify(seq)
    close()
    torch.set_num_threads(before)
    assert hits["host"] > operations / 20
    assert hits["disk"] > operations / 200
