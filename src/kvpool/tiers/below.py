"""What a cache does with the tiers below it: between the ledger's decisions and the transfers that carry them out.

Sequences that wait for their first step may have blocks below. They are looked for when the sequence is opened, so that
a slow tier works while the sequence waits its turn; a step takes what has come by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kvpool.backends import Backend
from kvpool.errors import KVError
from kvpool.ledger import Ledger, StepDecision
from kvpool.plan import Plan
from kvpool.pools import Pools
from kvpool.tiers.base import TierStats, pack_tokens
from kvpool.tiers.block_format import BlockFormat, CodecFormat, DeviceFormat
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.host import HostTier
from kvpool.tiers.identity import block_identity
from kvpool.tiers.mover import mover_for
from kvpool.tiers.options import TierOptions
from kvpool.tiers.prompt_load import Chain, Load
from kvpool.tiers.transfer import Transfer

Items = list[tuple[int, int]]
#: Host memory in front of a disk when none was asked for: the disk reads and writes host memory only.
STAGING_BYTES = 256 << 20


class Below:
    """The waiting sequences of one cache, and what is being brought up for them.

    Args:
        plan: Of the cache.
        ledger: Made with `offer=True`.
        transfer: To and from the tiers.

    Invariants: a load belongs to a sequence that waits; it is let go when the sequence is admitted or released.
    """

    def __init__(self, plan: Plan, ledger: Ledger, transfer: Transfer) -> None:
        self._ledger = ledger
        self.transfer = transfer
        self._tokens_per_block = plan.tokens_per_block
        self._waiting: dict[int, Load | None] = {}
        self._asked: set[int] = set()
        self.num_deferred = 0

    # --- sequences ------------------------------------------------------------------------------------------

    def opened(self, sequence: int) -> None:
        """Note a sequence that waits for a step, and begin to bring up what a slow tier has of it."""
        self.released(sequence)  # it may have waited before, and been paused
        self._waiting[sequence] = None
        if self.transfer.disk is not None:
            self._ask(sequence)

    def paused(self, sequence: int) -> None:
        """Keep what a sequence computed, whatever such blocks were worth before: it will be back."""
        keys = set(self._ledger.keys(sequence))
        self.transfer.keep([block for block in self._ledger.stored() if block.key in keys])

    def forked(self, sequence: int, fork: int) -> None:
        """Note the copy of a sequence that waits: it waits too, and nothing is on its way for it yet."""
        if sequence in self._waiting:
            self.opened(fork)

    def rewound(self, sequence: int) -> None:
        """Look again for a sequence that waits: it may go on with other tokens."""
        if sequence in self._waiting:
            self.opened(sequence)

    def released(self, sequence: int) -> None:
        """Forget a sequence; one that was admitted is forgotten already."""
        load = self._waiting.pop(sequence, None)
        self._asked.discard(sequence)
        if load is not None:
            self.transfer.let_go(load)

    def _ask(self, sequence: int) -> None:
        self._asked.add(sequence)
        n = self._tokens_per_block
        ids = self._ledger.tokens(sequence)
        device = self._ledger.in_tree(sequence)
        matched, most = self._ledger.matched(sequence), len(device[0])
        if most <= matched:
            return
        tokens = [pack_tokens(ids[i * n : (i + 1) * n]) for i in range(most)]
        chain = Chain(self._ledger.keys(sequence)[:most], tokens, self._ledger.extras(sequence)[:most])
        self._waiting[sequence] = self.transfer.start(chain, device, matched)

    def _expect(self, sequence: int, *, at_best: bool = False) -> None:
        """Tell the ledger what a waiting sequence can have with its load."""
        load = self._waiting[sequence]
        length = 0
        if load is not None:
            length = self.transfer.loaded(load, self._ledger.in_tree(sequence), at_best=at_best)
        self._ledger.expect(sequence, length)

    # --- steps ----------------------------------------------------------------------------------------------

    def announce(self, items: Items, *, comes: bool) -> None:
        """Tell the ledger what tiers may come to have of waiting sequences, so that it counts the room for it.

        Args:
            items: As for a step.
            comes: What is on its way comes, or stays out; what has come is there either way.
        """
        for sequence, _ in items:
            if sequence in self._waiting:
                if sequence not in self._asked:
                    self._ask(sequence)
                self._expect(sequence, at_best=comes)

    def forgo(self, items: Items) -> bool:
        """Let go what is brought up for sequences that do not fit with it; returns whether there was any.

        First what is under way: with it computed and with what has come the step is one that `fits` counted.
        """
        held = {sequence: load for sequence, _ in items if (load := self._waiting.get(sequence)) is not None}
        for sequence in [sequence for sequence, load in held.items() if not load.ready] or held:
            self._give_up(sequence)
        return bool(held)

    def _give_up(self, sequence: int) -> None:
        """Bring nothing up for a waiting sequence any more: it is computed instead."""
        self.released(sequence)
        self._waiting[sequence] = None
        self._asked.add(sequence)

    def wait(self, sequences: Iterable[int]) -> None:
        """Wait until what waiting sequences have below has come, at most until their deadlines."""
        for sequence in sequences:
            if sequence in self._waiting:
                if sequence not in self._asked:
                    self._ask(sequence)
                load = self._waiting[sequence]
                if load is not None:
                    self.transfer.wait(load)

    def ready(self, items: Items) -> Items:
        """Say what a step should take now, and tell the ledger what tiers have of it.

        A sequence whose blocks are still on their way drops out while others can go on; when none can, the step waits
        for them, at most until their deadline. What has not come by its deadline is missed.
        """
        waiting = [sequence for sequence, _ in items if sequence in self._waiting]
        if not waiting:
            return items
        for sequence in waiting:
            if sequence not in self._asked:
                self._ask(sequence)
        loads = {sequence: self._waiting[sequence] for sequence in waiting}
        under_way = {s for s, load in loads.items() if load is not None and not load.ready and not load.late}
        if len(under_way) < len(items):
            self.num_deferred += len(under_way)
        else:
            self.wait(under_way)
            under_way = set()
        for sequence in loads.keys() - under_way:
            self._expect(sequence)
        return [item for item in items if item[0] not in under_way]

    def carry_out(self, decision: StepDecision) -> bool:
        """Save what a step evicted and fill what it expects from below, before anything of it is written.

        Returns:
            False when a block was not there any more; the step must then be aborted and begun again.
        """
        if decision.evicted:
            self.transfer.save(decision.evicted)
        failed = set()
        for sequence, blocks in groupby(decision.onboards, lambda onboard: onboard.sequence):
            load = self._waiting[sequence]
            assert load is not None, "the ledger expects blocks that were not announced"
            wanted = [(o.group, o.block, load.chain, o.index) for o in blocks]
            if not all(self.transfer.onboard(wanted)):
                failed.add(sequence)
        for sequence in failed:
            self._give_up(sequence)
        if failed:
            return False
        for admission in decision.admitted:
            self.released(admission.sequence)
        return True

    def pass_through(self, sequence: int) -> None:
        """Make of a sequence's whole blocks what a trip through the tiers makes of them, to measure it."""
        format = self.transfer.format
        for group, plan in enumerate(format.plan.groups):
            if plan.is_state:
                continue  # kept as it is
            table, length = self._ledger.table(sequence, group)
            held = [(group, block) for block in table[: length // plan.tokens_per_block] if block >= 0]
            for at in range(0, len(held), format.num_blocks):
                blocks = held[at : at + format.num_blocks]
                format.leave(blocks)
                format.enter(blocks, [True] * len(blocks))

    # --- whole cache ----------------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Bring what the prefix tree holds to disk, within a time; returns whether all of it is there."""
        return self.transfer.flush(self._ledger.stored(), timeout_s)

    def clear(self, salt: bytes | None) -> None:
        """Forget in every tier what is stored under an encoded salt, or everything; loads under way are let go.

        Raises:
            TierError: What the disk has not written yet may come back, since it does not answer.
        """
        waiting = list(self._waiting)
        for sequence in waiting:
            self.released(sequence)
        if salt is None:
            self.transfer.clear(lambda extras: True)
        else:
            begin = len(salt).to_bytes(4, "little") + salt  # see the ledger's named_extras
            self.transfer.clear(lambda extras: extras.startswith(begin) or (not salt and not extras))
        for sequence in waiting:
            self.opened(sequence)

    def close(self, timeout_s: float) -> bool:
        """Flush and close the tiers, within a time; returns whether everything was kept."""
        for sequence in list(self._waiting):
            self.released(sequence)
        flushed = self.transfer.disk is None or self.flush(timeout_s / 2)
        return self.transfer.close(timeout_s / 2) and flushed

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier."""
        return self.transfer.stats()

    def check(self) -> None:
        """Verify the invariants of tiers and loads."""
        self.transfer.host.check()
        if self.transfer.disk is not None:
            self.transfer.disk.check()
        if not self._asked <= self._waiting.keys():
            raise KVError("tiers were asked for a sequence that does not wait")
        if not any(self._waiting.values()) and self.transfer.idle and self.transfer.host.num_pinned:
            raise KVError(f"{self.transfer.host.num_pinned} blocks of the host tier are held by nobody's load")


def open_below(plan: Plan, pools: Pools, ledger: Ledger, backend: Backend, options: TierOptions) -> Below:
    """Open the tiers of a cache. Its constants are frozen by it: stored blocks depend on them.

    Raises:
        PlanMismatch: The directory belongs to another plan, model or constants.
        TierError: It cannot be used, or a tier is too small for a block.
    """
    for constants in pools.constants.values():
        constants.freeze()
    format: BlockFormat = DeviceFormat(plan, pools)
    if options.codec is not None:
        format = CodecFormat(plan, pools, backend, options.codec)
    identity = block_identity(format.plan, format.constants, options.model, origin=format.origin)
    sizes = [group.bytes_per_block for group in format.plan.groups]
    host_bytes = max(STAGING_BYTES, 4 * max(sizes)) if options.host_bytes is None else options.host_bytes
    host = HostTier(host_bytes, sizes, identity, mover_for(pools.device, format.slabs))
    disk = None if options.disk is None else DiskTier(options.disk, identity, size_bytes=options.disk_bytes)
    return Below(plan, ledger, Transfer(format, host, disk))
