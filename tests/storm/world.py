"""One cache in a storm, and what must be true of it at every moment. Knows tokens and content, no blocks of its own."""

from __future__ import annotations

import random
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import kvpool as kv
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, SharedKind, StateKind
from kvpool.sequence import Sequence
from kvpool.step import Step

from . import content


@dataclass(frozen=True)
class Case:
    """One combination the storm blows over.

    Attributes:
        host_blocks: Blocks of the largest group that a host tier has room for; 0 for no host tier of its own.
        disk: Keep blocks in a directory, too.
        constants: Where they come from: `given` for scales other than 1, `unit`, `mixed` for keys with mixing and
            rotation, or `calibrated` on content, with smoothing and rotation.
        num_blocks: Blocks every group gets at first, roughly; few, so that eviction never rests.
        tolerance: On attention outputs of magnitude 128; 0.3 covers probabilities and values rounded to bf16.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    codec: str | Mapping[str, object] = "bf16"
    layout: str = "HND"
    tokens_per_block: int = 4
    backend: str = "reference"
    num_blocks: int = 30
    query_groups: int = 2
    tolerance: float = 1e-2
    max_step_tokens: int = 64
    constants: str = "given"
    options: Mapping[str, Any] = field(default_factory=dict)
    host_blocks: int = 0
    disk: bool = False


@dataclass(eq=False)
class Live:
    """What the world knows of one live sequence.

    Attributes:
        links: One a token: its whole history (content.extend).
        computed: Tokens whose content is held.
        admitted: A step has named it, so its prompt has been matched.
        limit: Its `max_cached_tokens`.
        resumed: It was paused since it was opened.
    """

    seq: Sequence
    tokens: list[int]
    extras: tuple[object, ...]
    limit: int | None = None
    links: list[int] = field(default_factory=list)
    computed: int = 0
    admitted: bool = False
    resumed: bool = False

    def __post_init__(self) -> None:
        self.extend_links()

    def extend_links(self) -> None:
        content.extend(self.links, content.root(self.extras), self.tokens[len(self.links) :])


def attends(spec: LayerSpec) -> bool:
    """True for a layer with keys and values, of its own or another's."""
    return any(isinstance(kind, KVKind | LatentKind | SharedKind) for kind in spec.kinds)


class Fault(AssertionError):
    """The cache did what it must not do."""


class Storm:
    """A cache, the sequences that live in it, and every history that was ever made matchable.

    Args:
        case: Codec, layout, kinds, backend.
        seed: Decides everything.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.seed = seed
        self.rng = random.Random(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.now = 0.0
        self.spec = kv.CacheSpec(layers=case.layers, dtype="bf16", max_seq_len=512)
        self.plan = self._plan()
        self.cache = kv.KVCache(self.plan, backend=case.backend, clock=lambda: self.now, **self._tiers())
        self._set_constants()
        self._poison()
        kept = [g.num_blocks * g.tokens_per_block for g in self.plan.groups if not g.is_state]
        self.longest = min([150, *kept]) - 1
        self.live: list[Live] = []
        self.committed: set[int] = set()
        self.past: list[tuple[tuple[object, ...], list[int]]] = []
        self.log: deque[str] = deque(maxlen=12)
        self.counts: dict[str, int] = {}
        self.lost: dict[tuple[int, str], tuple[int, int]] = {}

    # --- making it ------------------------------------------------------------------------------------------

    def _plan(self) -> kv.Plan:
        case = self.case
        options = {
            "codec": case.codec,
            "layout": case.layout,
            "tokens_per_block": case.tokens_per_block,
            "max_sequences": 8,
            "max_step_tokens": case.max_step_tokens,
            "typical_seq_len": 64,
            **case.options,
        }
        roomy = kv.make_plan(self.spec, budget=1 << 26, **options)
        budget = sum(-(-g.bytes_per_block * case.num_blocks // 4096) * 4096 for g in roomy.groups)
        return kv.make_plan(self.spec, budget=budget, **options)

    def _tiers(self) -> dict[str, Any]:
        """Where blocks go below the device; the directory goes with the storm."""
        case, tiers = self.case, {}
        if case.host_blocks:
            largest = max(group.bytes_per_block for group in self.plan.groups)
            tiers["host_size"] = case.host_blocks * -(-largest // 4096) * 4096
        if case.disk:
            directory = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, directory)
            tiers |= {"disk": directory, "disk_size": "16MiB", "model": "storm"}
        return tiers

    def _set_constants(self) -> None:
        """K and V get constants of their own, none of them 1 unless asked."""
        cache, table = self.cache, self.cache.pools.constants
        if self.case.constants == "unit":
            cache.set_scales("unit")
        elif self.case.constants == "calibrated":
            links: list[int] = []
            content.extend(links, 0, range(40))
            for layer, part in table:
                cache.calibrate({layer: {part: self.given(layer, part, links)}}, smoothing=True, rotation=True)
        elif self.case.constants == "mixed":
            for layer, part in table:
                if part == "k":
                    cache.set_constants(layer, mixing=self._mixing(layer), rotation={"k": True})
        else:
            for (layer, part), constants in table.items():
                if constants.needs_scale:
                    cache.set_constants(layer, **{part: 1.7 if part == "k" else 0.9})

    def _mixing(self, layer: int) -> torch.Tensor:
        part = self.cache.pools.part(layer, "k")
        shape = (part.num_heads, part.vector.dim, part.vector.dim)
        random = torch.randn(shape, generator=torch.Generator().manual_seed(layer))
        return torch.eye(shape[-1]) + 0.4 * random / shape[-1] ** 0.5

    def _poison(self) -> None:
        """Fill all memory with ones: NaN in every float format, and no history's content."""
        for slab in self.cache.pools.slabs:
            for block in range(slab.num_blocks):
                for piece in slab.block_bytes(block):
                    piece.fill_(0xFF)

    # --- what must be stored --------------------------------------------------------------------------------

    def parts(self, layer: int) -> tuple[tuple[Any, ...], Any, int]:
        """Return (parts that make up a key, part that holds values, elements of a value) of an attention layer."""
        layer = self.plan.source_layer(layer)
        for kind in self.spec.layers[layer].kinds:
            if isinstance(kind, KVKind):
                return (self.cache.pools.part(layer, "k"),), self.cache.pools.part(layer, "v"), kind.v_head_dim
            if isinstance(kind, LatentKind):
                latent = self.cache.pools.part(layer, "latent")
                joint = latent.vector.dim == kind.kv_lora_rank + kind.qk_rope_head_dim
                keys = (latent,) if joint else (latent, self.cache.pools.part(layer, "rope"))
                return keys, latent, kind.kv_lora_rank
        raise LookupError(layer)

    @staticmethod
    def part_names(kind: object) -> tuple[str, ...]:
        """Names of what `write` takes for a kind."""
        names = {KVKind: ("k", "v"), LatentKind: ("latent", "rope"), IndexerKind: ("index",)}
        return names.get(type(kind), ())

    def given(self, layer: int, part: str, links: list[int]) -> torch.Tensor:
        """What the model hands to `write` for these tokens: fp32 `[T, H, D]`."""
        for kind in self.spec.layers[layer].kinds:
            if isinstance(kind, KVKind) and part in ("k", "v"):
                dim = kind.head_dim if part == "k" else kind.v_head_dim
                return content.vectors(links, layer, part, kind.num_kv_heads, dim)
            if isinstance(kind, LatentKind) and part in ("latent", "rope"):
                dim = kind.kv_lora_rank if part == "latent" else kind.qk_rope_head_dim
                return content.vectors(links, layer, part, 1, dim)
            if isinstance(kind, IndexerKind) and part == "index":
                return content.vectors(links, layer, part, 1, kind.index_head_dim)
            if isinstance(kind, StateKind) and part == kind.name:
                return content.vectors(links, layer, part, 1, kind.num_elements)
        raise LookupError((layer, part))

    def stored(self, part: Any, links: list[int]) -> torch.Tensor:
        """What a part must give back for these tokens: what was given, through its codec; fp32 `[T, H, D]`."""
        x = self.given(part.layer, part.name, links)
        if x.shape[-1] != part.vector.dim:  # a latent with its rope part behind it
            x = torch.cat([x, self.given(part.layer, "rope", links)], -1)
        c = part.constants
        encoded = part.codec.encode(c.maps.store(x), part.vector, c.scale)
        return c.maps.restore(part.codec.decode(encoded, part.vector, c.scale)).float()

    def lifetime(self, part: Any) -> Lifetime | None:
        """How long the tokens of a part are kept."""
        return self.plan.groups[part.group].lifetime

    @staticmethod
    def visible(positions: torch.Tensor, num_tokens: int, lifetime: Lifetime | None) -> torch.Tensor:
        """Which tokens `[n]` the rows at `positions` `[q]` see: bool `[q, n]`."""
        token, row = torch.arange(num_tokens)[None], positions[:, None].long()
        seen = token <= row
        if lifetime is not None and lifetime.window is not None:
            seen &= (token > row - lifetime.window) | (token < lifetime.sink_tokens)
        if lifetime is not None and lifetime.chunk is not None:
            seen &= token >= row // lifetime.chunk * lifetime.chunk
        return seen

    # --- prefixes -------------------------------------------------------------------------------------------

    def most_cached(self, live: Live, also: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """The longest prefix a match may find: made matchable once, and one token left to compute."""
        known = 0
        for link in live.links[: len(live.tokens) - 1]:
            if link not in self.committed and link not in also:
                break
            known += 1
        return known if live.limit is None else min(known, live.limit)

    # --- steps ----------------------------------------------------------------------------------------------

    def check_step(self, step: Step, items: list[tuple[Live, int]]) -> list[tuple[Live, int, int]]:
        """Compare a step's tensors with what the world knows; return (sequence, first token, tokens) a table row."""
        by_id = {live.seq.id: (live, most) for live, most in items}
        rows, start_row, samples, written_here = [], 0, [], set()
        room = self.case.max_step_tokens
        for row, handle in enumerate(step.sequences):
            live, most = by_id[handle]
            first = int(step.positions[start_row])
            count = int(step.num_tokens[row])
            if not live.admitted:
                cached = live.seq.num_cached_tokens
                self.must(first == cached or live.resumed, f"starts at {first}, num_cached_tokens says {cached}")
                bound = self.most_cached(live, written_here)
                self.must(first <= bound, f"{first} tokens matched, at most {bound} were ever matchable")
            else:
                self.must(first == live.computed, f"starts at {first}, {live.computed} are computed")
            self.must(0 < count <= min(most, len(live.tokens) - first, room), f"{count} tokens of at most {most}")
            stop_row = start_row + count
            want = live.tokens[first : first + count]
            self.must(step.token_ids[start_row:stop_row].tolist() == want, "wrong token ids")
            self.must(step.positions[start_row:stop_row].tolist() == list(range(first, first + count)), "positions")
            if first + count == len(live.tokens):
                samples.append((stop_row - 1, row))
            n = self.case.tokens_per_block
            written_here |= set(live.links[: (first + count) // n * n])
            rows.append((live, first, count))
            start_row, room = stop_row, room - count
        self.must(step.cu_seqlens.tolist()[-1] == start_row == step.total_tokens, "rows do not add up")
        pairs = list(zip(step.last_rows.tolist(), step.sample_seqs.tolist(), strict=True))
        self.must(pairs == samples, f"samples are {pairs}, must be {samples}")
        for index, tables in enumerate(step.groups):
            if not self.plan.groups[index].is_state:
                self._check_tables(tables, rows, index)
        return rows

    def _check_tables(self, tables: Any, rows: list[tuple[Live, int, int]], index: int) -> None:
        n, row0, seen = self.plan.groups[index].tokens_per_block, 0, set()
        for row, (_, first, count) in enumerate(rows):
            self.must(int(tables.seq_lens[row]) == first + count, "seq_lens is not the length after the step")
            slots = tables.slots[row0 : row0 + count].tolist()
            table = tables.block_table[row].tolist()
            for position, slot in zip(range(first, first + count), slots, strict=True):
                want = table[position // n] * n + position % n
                self.must(slot in (want, -1), f"position {position} is written to slot {slot}, its table says {want}")
                self.must(slot == -1 or slot not in seen, f"slot {slot} is written twice")
                seen.add(slot)
            row0 += count

    def ended(self, rows: list[tuple[Live, int, int]], commit: bool) -> None:
        """A step has ended well: what it computed is held, and with `commit` matchable."""
        for live, first, count in rows:
            live.admitted = True
            live.computed = first + count
            if commit:
                self.committed |= set(live.links[: live.computed])

    # --- audits ---------------------------------------------------------------------------------------------

    def audit(self, live: Live) -> None:
        """Read back all a sequence holds and compare every vector that its next token would see."""
        if not live.computed:
            return
        for layer, spec in enumerate(self.spec.layers):
            if not attends(spec):
                continue
            key_parts, value_part, _ = self.parts(layer)
            seen = self.visible(torch.tensor([live.computed]), live.computed, self.lifetime(value_part))[0]
            parts = dict.fromkeys((*key_parts, value_part))
            for part, got in zip(parts, self.cache.read(layer, live.seq), strict=True):
                self.same(part, got, live.links[: live.computed], seen, f"{live.seq}")

    def same(self, part: Any, got: torch.Tensor, links: list[int], seen: torch.Tensor, whose: str) -> None:
        """`got [n, H, D]` holds the content of these tokens, where `seen [n]`."""
        self.must(len(got) == len(links), f"{whose}: {len(got)} tokens given, {len(links)} are computed")
        wrong = ((got != self.stored(part, links)).flatten(1).any(1) & seen).nonzero().flatten()
        if len(wrong):
            place = int(wrong[0])
            found = self.explain(part, got[place])
            raise Fault(f"{whose}: layer {part.layer}, {part.name}, position {place} holds {found}")

    def explain(self, part: Any, vector: torch.Tensor) -> str:
        """Say whose vector this is, of all histories the world knows."""
        for extras, tokens in [*((live.extras, live.tokens) for live in self.live), *self.past]:
            links: list[int] = []
            content.extend(links, content.root(extras), tokens)
            for layer, spec in enumerate(self.spec.layers):
                for other in {*self.parts(layer)[0], self.parts(layer)[1]} if attends(spec) else ():
                    name = other.name
                    if other.vector != part.vector or other.num_heads != part.num_heads:
                        continue
                    hit = (self.stored(other, links) == vector).flatten(1).all(1).nonzero()
                    if len(hit):
                        return f"position {int(hit[0])} of tokens {tokens[:8]}..., {extras}, layer {layer}, {name}"
        return f"no known content: {vector.flatten()[:6].tolist()}..."

    def account(self) -> None:
        """Counters add up, and the ledger's own invariants hold."""
        self.cache.check()
        stats = self.cache.stats()
        total = stats.used + stats.cached + stats.free
        self.must(total == stats.committed, f"used + cached + free = {total}, committed = {stats.committed}")
        held = any(live.computed for live in self.live)
        self.must(held or stats.used == 0 or bool(self.pinned()), f"nothing is held, {stats.used} blocks are used")

    def pinned(self) -> list[Any]:
        """Pins that are out; operations that pin replace this."""
        return []

    def must(self, holds: bool, what: str) -> None:
        """Raise unless it holds."""
        if not holds:
            raise Fault(what)

    # --- the storm itself -----------------------------------------------------------------------------------

    def run(self, num_operations: int, operations: Mapping[str, Any]) -> None:
        """Do random operations, and after each account, and audit one sequence; at the end audit all."""
        names = list(operations)
        weights = [operations[name].weight for name in names]
        try:
            while sum(self.counts.values()) < num_operations:
                name = self.rng.choices(names, weights)[0]
                done = operations[name].run(self)
                if done is None:
                    continue  # not possible now
                self.counts[name] = self.counts.get(name, 0) + 1
                self.log.append(f"{name} {done}")
                self.account()
                if self.live:
                    self.audit(self.rng.choice(self.live))
            for live in self.live:
                self.audit(live)
            self._drain()
        except Exception as error:
            steps = "\n  ".join(self.log)
            raise Fault(
                f"{self.case.name}, seed {self.seed}, after {sum(self.counts.values())} operations: {error}\n"
                f"last operations:\n  {steps}\n"
                f"reproduce: pytest tests/storm -k '{self.case.name}' --storm-seed {self.seed}"
            ) from error

    def _drain(self) -> None:
        """Release everything: nothing is held any more."""
        for live in self.live:
            live.seq.release()
        self.live.clear()
        self.account()
        self.must(self.cache.flush(), "not everything came to disk")
        self.must(self.cache.close(), "the tiers lost something while closing")


def split(rng: random.Random, live: list[Live], most: int) -> Iterator[Live]:
    """Yield a random choice of at most `most` sequences, in random order."""
    yield from rng.sample(live, min(len(live), rng.randint(1, most)))
