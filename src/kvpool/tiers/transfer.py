"""Between the device's slabs and the tiers below: what to keep of what is evicted, and how it comes back.

Shaped like the engines' connectors: `find` says how many blocks can be loaded, `start` begins to load them, a `Load` is
waited for, `onboard` puts them in place, `save` keeps what leaves, `flush` makes it last. Rewinding needs nothing: a
key names content, and only whole blocks in the prefix tree leave the device.

Device and host are copied by the thread that opens steps; the disk works on host memory only, behind it. So nothing
that is late can write into a block the device has given to somebody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from operator import or_

from kvpool.errors import TierError
from kvpool.ledger.decisions import Evicted
from kvpool.tiers.base import BlockId, Entry, Outcome, Pieces, Status, Tier, TierStats, pack_tokens, payload_bytes
from kvpool.tiers.block_format import BlockFormat
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.hit_value import HitValue
from kvpool.tiers.host import HostTier
from kvpool.tiers.prompt_load import Chain, Fetch, Load
from kvpool.tiers.usable_length import longest, needed

#: By group and whole block of a prompt, whether the device has it: as the ledger's `in_tree` says.
Device = Sequence[Sequence[int]]
#: Blocks of a lower priority are not kept when they are evicted (TensorRT-LLM's default).
MIN_PRIORITY = 30
#: How long a load may take: a time for the disk to answer, and a rate it must reach.
LATENCY_S = 0.2
BYTES_PER_S = 200e6
#: How long `clear` waits for what is being written.
CLEAR_S = 30.0
#: Blocks a flush copies at once.
FLUSH_BLOCKS = 32


class Transfer:
    """Copies blocks between the slabs of one device, a host tier and perhaps a disk tier.

    Args:
        format: How blocks look to the tiers.
        host: Always there: what the disk reads and writes is host memory.
        disk: Or None.
        min_priority: Blocks of a lower priority are dropped when they are evicted.

    Invariants: one thread calls everything but what workers of the disk report; a place of the host tier that a worker
    may touch is pinned.
    """

    def __init__(
        self,
        format: BlockFormat,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        min_priority: int = MIN_PRIORITY,
    ) -> None:
        self.format = format
        self.plan = format.plan
        self.host = host
        self.disk = disk
        self.min_priority = min_priority
        self.values = [HitValue() for _ in self.plan.groups]
        self._condition = threading.Condition()
        self._fetches: dict[BlockId, Fetch] = {}
        #: Blocks of the host tier that the disk has not taken yet.
        self._unsaved: dict[BlockId, None] = {}

    # --- up: how many can be loaded, load, wait, onboard ----------------------------------------------------

    def find(self, chain: Chain, device: Device, matched: int) -> int:
        """Return how many leading blocks could be had.

        Args:
            chain: Of the prompt.
            device: By group and block, whether the device has it.
            matched: Leading blocks that can be had with those of the device alone.
        """
        have = [list(map(or_, row, self._have(group, chain))) for group, row in enumerate(device)]
        return longest(self.plan.groups, have, self.plan.tokens_per_block, above=matched)

    def start(self, chain: Chain, device: Device, matched: int) -> Load | None:
        """Begin to bring into the host tier what `find` counts on, and hold it there; None when there is nothing."""
        count = self.find(chain, device, matched)
        if count <= matched:
            return None
        wanted = [
            self._entry(group, chain, index)
            for group, plan in enumerate(self.plan.groups)
            for blocks in needed(plan, count, self.plan.tokens_per_block)
            for index in blocks
            if not device[group][index]
        ]
        load = Load(chain, time.monotonic() + LATENCY_S)
        from_disk: list[tuple[Entry, Pieces]] = []
        for entry in wanted:
            place = self._hold(load, entry)
            if place is not None:
                from_disk.append((entry, place))
        if from_disk and self.disk is not None:
            seconds = LATENCY_S + sum(payload_bytes(pieces) for _, pieces in from_disk) / BYTES_PER_S
            load.deadline = time.monotonic() + seconds
            fetches = [load.fetches[entry.id] for entry, _ in from_disk]
            self.disk.get(from_disk, deadline_s=seconds, notify=lambda i, outcome: self._arrived(fetches[i], outcome))
        return load

    def wait(self, load: Load) -> bool:
        """Wait until a load is ready, at most until its deadline; returns whether it is."""
        with self._condition:
            self._condition.wait_for(lambda: load.ready, max(load.deadline - time.monotonic(), 0.0))
        return load.ready

    def loaded(self, load: Load, device: Device, *, at_best: bool = False) -> int:
        """Return how many leading blocks can be had with a load as far as it has come; else 0.

        Args:
            load: Of the prompt.
            device: By group and block, whether the device has it now.
            at_best: Count what is under way.
        """
        keys = load.chain.keys
        have = [
            [there or load.holds((group, key), at_best=at_best) for there, key in zip(row, keys, strict=False)]
            for group, row in enumerate(device)  # the prompt may be longer by now
        ]
        return longest(self.plan.groups, have, self.plan.tokens_per_block)

    def let_go(self, load: Load) -> None:
        """End a load: its blocks may be given up again, and what is still under way is nobody's."""
        for block in load.pinned:
            self.host.unpin(block)
        load.pinned.clear()
        with self._condition:
            for fetch in load.fetches.values():
                fetch.loads -= 1
                self._end_fetch(fetch)
        load.fetches.clear()

    def onboard(self, chain_blocks: Sequence[tuple[int, int, Chain, int]]) -> list[bool]:
        """Copy blocks from the host tier into the device, in one batch.

        Args:
            chain_blocks: (group, block id on the device, chain, index in the chain) of each.

        Returns:
            Which of them hold their content now.
        """
        found: list[bool] = []
        for at in range(0, len(chain_blocks), self.format.num_blocks):
            part = chain_blocks[at : at + self.format.num_blocks]
            blocks = [(group, block) for group, block, _, _ in part]
            entries = [self._entry(group, chain, index) for group, _, chain, index in part]
            outcomes = self.host.get(list(zip(entries, self.format.room(blocks), strict=True))).outcomes
            came = [outcome.ok for outcome in outcomes]
            self.format.enter(blocks, came)
            found += came
            for entry, ok in zip(entries, came, strict=True):
                if ok:
                    self.values[entry.group].hit(entry.id)
        return found

    # --- down: save, flush ----------------------------------------------------------------------------------

    def save(self, leaving: Iterable[Evicted]) -> int:
        """Keep blocks that leave the device, before anything is written into them; returns how many were kept.

        Whole blocks of at least `min_priority` whose kind has been worth it go to the host tier, and from there to the
        disk behind the caller's back. What a tier has is not written again.
        """
        worth = [b for b in leaving if self._worth(b) and self.values[b.group].admit((b.group, b.key), b.uses)]
        return sum(self._keep(worth))

    def keep(self, blocks: Iterable[Evicted]) -> int:
        """Copy blocks that stay on the device, as far as there is room below; returns how many are kept."""
        return sum(self._keep([block for block in blocks if self._worth(block)]))

    def _worth(self, block: Evicted) -> bool:
        return block.priority >= self.min_priority and len(block.token_ids) == self.plan.tokens_per_block

    def _keep(self, blocks: Sequence[Evicted]) -> list[bool]:
        entries = [self._entry_of(block) for block in blocks]
        kept = self.host.renew(entries)  # what is there is neither converted nor written again
        new = [i for i, there in enumerate(kept) if not there]
        for at in range(0, len(new), self.format.num_blocks):
            part = new[at : at + self.format.num_blocks]
            pieces = self.format.leave([(blocks[i].group, blocks[i].block) for i in part])
            outcomes = self.host.put(list(zip([entries[i] for i in part], pieces, strict=True))).outcomes
            for i, outcome in zip(part, outcomes, strict=True):
                kept[i] = outcome.ok
        if self.disk is not None:
            self._unsaved.update((entry.id, None) for entry, ok in zip(entries, kept, strict=True) if ok)
            self.spill()
        return kept

    def spill(self) -> None:
        """Give the disk what it has not yet, as much as it takes without waiting."""
        if self.disk is None or not self._unsaved:
            return
        ids = list(self._unsaved)
        there = self.disk.exists(ids)
        batch: list[tuple[Entry, Pieces]] = []
        for block, stored in zip(ids, there, strict=True):
            found = None if stored else self.host.pin(block)
            if found is None:  # on disk, or given up by the host tier before the disk took it
                del self._unsaved[block]
            else:
                batch.append(found)

        def ended(index: int, outcome: Outcome) -> None:
            self.host.unpin(batch[index][0].id)

        ticket = self.disk.put(batch, notify=ended)
        for (entry, _), outcome in zip(batch, ticket.outcomes, strict=True):
            if outcome.status is not Status.REFUSED:
                del self._unsaved[entry.id]

    def flush(self, blocks: Iterable[Evicted], timeout_s: float) -> bool:
        """Bring blocks of the device to disk and make them durable, within a time.

        Args:
            blocks: Everything in the prefix tree; parents before children, so that what is cut off is the far end.
            timeout_s: The most it takes.

        Returns:
            Whether everything is kept.
        """
        until = time.monotonic() + timeout_s
        if self.disk is None:
            return True  # host memory ends with the process: nothing would outlive it
        worth = [block for block in blocks if self._worth(block)]
        there = self.disk.exists([(block.group, block.key) for block in worth])
        waiting = [block for block, stored in zip(worth, there, strict=True) if not stored]
        while (waiting or self._unsaved) and time.monotonic() < until:
            part, rest = waiting[:FLUSH_BLOCKS], waiting[FLUSH_BLOCKS:]
            refused = [block for block, ok in zip(part, self._keep(part), strict=True) if not ok]
            waiting = refused + rest
            self.spill()
            if refused or not waiting:
                time.sleep(0.001)  # the disk is behind: host memory comes free as it writes
        return self.disk.flush(max(until - time.monotonic(), 0.0)) and not waiting and not self._unsaved

    def clear(self, wanted: Callable[[bytes], bool]) -> None:
        """Forget the blocks whose extras are wanted, in every tier, for good.

        Raises:
            TierError: The disk does not answer.
        """
        if self.disk is not None:
            if not self.disk.settle(CLEAR_S):
                raise TierError(
                    f"the disk has not taken what it was given in {CLEAR_S:.0f} s; nothing was cleared there"
                )
            self.disk.drop(self.disk.find(wanted))
        self.host.drop(self.host.find(wanted))
        for block in [b for b in self._unsaved if not self.host.exists([b])[0]]:
            del self._unsaved[block]

    @property
    def idle(self) -> bool:
        """True when the disk brings and takes nothing."""
        return not self._fetches and (self.disk is None or self.disk.idle)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Close the tiers, within a time."""
        done = self.disk is None or self.disk.close(timeout_s)
        return self.host.close() and done

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier."""
        tiers: list[Tier] = [self.host] if self.disk is None else [self.host, self.disk]
        return {tier.name: tier.stats() for tier in tiers}

    # --- inside ---------------------------------------------------------------------------------------------

    def _hold(self, load: Load, entry: Entry) -> Pieces | None:
        """Hold a block for a load; returns the place to read it into when the disk must bring it."""
        found = self.host.pin(entry.id)
        if found is not None:
            if found[0].differing(entry):
                self.host.unpin(entry.id)
            else:
                load.pinned.add(entry.id)
            return None
        with self._condition:
            fetch = self._fetches.get(entry.id)
            if fetch is not None:
                fetch.loads += 1
                load.fetches[entry.id] = fetch
                return None
            if self.disk is None:
                return None
            place = self.host.reserve(entry, self.plan.groups[entry.group].bytes_per_block)
            if place is not None:
                self._fetches[entry.id] = load.fetches[entry.id] = Fetch(entry.id)
            return place

    def _arrived(self, fetch: Fetch, outcome: Outcome) -> None:
        """Take what the disk says of a block; called by its workers."""
        with self._condition:
            if outcome.ok:
                self.host.publish(fetch.block)
            else:
                self.host.abandon(fetch.block)
            fetch.arrived = outcome.ok
            del self._fetches[fetch.block]
            self._end_fetch(fetch)
            self._condition.notify_all()

    def _end_fetch(self, fetch: Fetch) -> None:
        if fetch.arrived and not fetch.loads:
            self.host.unpin(fetch.block)

    def _entry(self, group: int, chain: Chain, index: int) -> Entry:
        parent = chain.keys[index - 1] if index else b""
        position = index * self.plan.tokens_per_block
        return Entry(group, chain.keys[index], chain.tokens[index], parent, position, chain.extras[index])

    def _entry_of(self, block: Evicted) -> Entry:
        return Entry(
            block.group,
            block.key,
            pack_tokens(block.token_ids),
            block.parent if block.index else b"",
            block.index * self.plan.tokens_per_block,
            block.extras,
            block.priority,
        )

    def _have(self, group: int, chain: Chain) -> list[bool]:
        """Say which blocks of a chain some tier has."""
        ids = [(group, key) for key in chain.keys]
        have = self.host.exists(ids)
        if self.disk is not None:
            have = [a or b for a, b in zip(have, self.disk.exists(ids), strict=True)]
        with self._condition:
            return [h or block in self._fetches for h, block in zip(have, ids, strict=True)]
