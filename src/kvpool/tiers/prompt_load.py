"""The blocks of one prompt, on their way up: what is held for it in the host tier, and what is still to come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.tiers.base import BlockId


@dataclass(frozen=True)
class Chain:
    """The whole blocks of a prompt, in order.

    Attributes:
        keys: The ledger's identity keys.
        tokens: Packed token ids of each block.
        extras: What else the keys depend on, of each block.
    """

    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    extras: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(slots=True, eq=False)
class Fetch:
    """A block on its way from disk into a reserved place of the host tier; several loads may want it.

    Attributes:
        arrived: None while under way.
        loads: Loads that want it; it stays pinned until they are all let go.
    """

    block: BlockId
    arrived: bool | None = None
    loads: int = 1


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of one prompt that are being brought into the host tier and held there.

    Attributes:
        chain: What is loaded.
        pinned: Blocks held in the host tier by this load.
        fetches: Blocks on their way from disk.
        deadline: After it, what has not come is missed.
    """

    chain: Chain
    deadline: float
    pinned: set[BlockId] = field(default_factory=set)
    fetches: dict[BlockId, Fetch] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """True when nothing is under way any more."""
        return all(fetch.arrived is not None for fetch in self.fetches.values())

    @property
    def late(self) -> bool:
        """True when the deadline has passed and something is still under way."""
        return time.monotonic() >= self.deadline and not self.ready

    def holds(self, block: BlockId, *, at_best: bool = False) -> bool:
        """True when a block is in the host tier and stays there for this load; `at_best` also when it may come."""
        fetch = self.fetches.get(block)
        arrived = fetch is not None and (fetch.arrived is True or (at_best and fetch.arrived is None))
        return arrived or block in self.pinned
