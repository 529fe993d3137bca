"""What every tier is: a store of blocks by key, asked in batches, that may be slow, full or broken and never lies.

Holds the protocol and the plain data that crosses it. Knows no plan, no pool and no sequence: a block is an `Entry` and
the memory its bytes are in.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol, runtime_checkable

from kvpool.errors import PlanMismatch, TierError

#: Memory of a block, in order: `(address, bytes)` pairs. One for most groups, one a layer for a layer-first group.
Pieces = tuple[tuple[int, int], ...]
#: What names a block in a tier: group and chained key.
BlockId = tuple[int, bytes]

DEFAULT_PRIORITY = 35
MAX_KEY_BYTES = 64
MAX_EXTRAS_BYTES = 1 << 16
MAX_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Entry:
    """What a block carries when it leaves the device.

    Attributes:
        group: Index of the group in the plan.
        key: The ledger's chained identity key: 16 bytes or more.
        tokens: Token ids the block holds, int64 little-endian (`pack_tokens`): as many as are valid.
        parent: Key of the block before it; empty at the start of a sequence.
        position: Tokens before the first of these.
        extras: What else the keys depend on, encoded by the ledger: salt, adapter, media.
        priority: 0..100; the lowest go first.
    """

    group: int
    key: bytes
    tokens: bytes
    parent: bytes = b""
    position: int = 0
    extras: bytes = b""
    priority: int = DEFAULT_PRIORITY

    def __post_init__(self) -> None:
        limits = (
            ("group", self.group, 0, 0xFFFF),
            ("position", self.position, 0, 1 << 48),
            ("priority", self.priority, 0, 100),
            ("bytes of the key", len(self.key), 16, MAX_KEY_BYTES),
            ("bytes of the parent key", len(self.parent), 0, MAX_KEY_BYTES),
            ("bytes of extras", len(self.extras), 0, MAX_EXTRAS_BYTES),
            ("bytes of tokens", len(self.tokens), 8, 8 * MAX_TOKENS),
        )
        for name, value, low, high in limits:
            if not isinstance(value, int) or not low <= value <= high:
                raise TierError(f"{name} of a tier entry must be {low}..{high}, got {value!r}")
        if len(self.tokens) % 8:
            raise TierError(f"tokens of a tier entry are int64: {len(self.tokens)} bytes are no multiple of 8")

    @property
    def id(self) -> BlockId:
        """Group and key."""
        return self.group, self.key

    @property
    def parent_id(self) -> BlockId:
        """Group and key of the block before."""
        return self.group, self.parent

    @property
    def num_tokens(self) -> int:
        """Valid tokens of the block."""
        return len(self.tokens) // 8

    def differing(self, other: Entry) -> tuple[str, ...]:
        """Return the fields in which an entry of the same key is about other content; empty when it is the same."""
        fields = ("group", "key", "parent", "position", "tokens", "extras")
        return tuple(name for name in fields if getattr(self, name) != getattr(other, name))


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Encode token ids as int64, little-endian."""
    return array("q", token_ids).tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """Decode what `pack_tokens` made."""
    return array("q", tokens).tolist()


@dataclass(frozen=True)
class Identity:
    """What a block's bytes depend on besides its tokens, as named parts.

    Blocks of one identity may be exchanged; between two, the differing parts are named.

    Attributes:
        parts: For instance `block_format`, `constants`, `model`; values are texts.
    """

    parts: Mapping[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Mapping):
            raise TierError(f"an identity is made of named parts, got {type(self.parts).__name__}")
        for name, value in self.parts.items():
            if not isinstance(name, str) or not isinstance(value, str) or not name:
                raise TierError(f"identity parts are texts by name, got {name!r}: {value!r}")

    @cached_property
    def json(self) -> str:
        """The parts in one form only: sorted, without spaces."""
        return json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes, equal in every process."""
        return hashlib.sha256(self.json.encode()).digest()[:16]

    def differing(self, other: Identity) -> tuple[str, ...]:
        """Return the names of the parts that differ or that only one of the two has."""
        names = sorted(self.parts.keys() | other.parts.keys())
        return tuple(n for n in names if self.parts.get(n) != other.parts.get(n))

    def require(self, found: Identity, what: str) -> None:
        """Raise `PlanMismatch` with the differing parts unless `found` equals this identity."""
        fields = self.differing(found)
        if fields:
            pairs = "; ".join(f"{n}: {found.parts.get(n)!r}, expected {self.parts.get(n)!r}" for n in fields)
            raise PlanMismatch(
                f"{what} belongs to another plan or model: {pairs}. Use another directory or file", fields
            )


class Status(Enum):
    """What became of one block of a batch."""

    HIT = "hit"
    STORED = "stored"
    #: Not there; also what was there and is found damaged is a miss from then on.
    MISS = "miss"
    #: Back-pressure: no room, now; nothing was done.
    REFUSED = "refused"
    #: The deadline passed first.
    LATE = "late"
    #: A checksum or a length is wrong; the block is forgotten.
    DAMAGED = "damaged"
    #: The key is there with other tokens or extras.
    MISMATCH = "mismatch"
    #: The operating system said no.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A status and, where it is no success, why."""

    status: Status
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True when the bytes are where they should be."""
        return self.status in (Status.HIT, Status.STORED)


HIT = Outcome(Status.HIT)
STORED = Outcome(Status.STORED)
MISS = Outcome(Status.MISS)

Notify = Callable[[int, Outcome], None]


class Ticket:
    """The fate of one batch.

    Memory named in the batch belongs to the tier until `done`; also after `cancel`, which never waits.

    Args:
        count: Blocks in the batch.
        notify: Called with (index, outcome) as each block ends, by the thread that ends it.
        deadline_s: Seconds from now after which a block not begun is `LATE`.
    """

    __slots__ = ("_condition", "_left", "_notify", "_outcomes", "cancelled", "deadline")

    def __init__(self, count: int, notify: Notify | None = None, deadline_s: float | None = None) -> None:
        self._condition = threading.Condition()
        self._outcomes: list[Outcome | None] = [None] * count
        self._left = count
        self._notify = notify
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.cancelled = False

    def finish(self, index: int, outcome: Outcome) -> None:
        """Settle one block; for tiers."""
        if self._notify is not None:
            self._notify(index, outcome)
        with self._condition:
            assert self._outcomes[index] is None, "a block of a batch ended twice"
            self._outcomes[index] = outcome
            self._left -= 1
            if not self._left:
                self._condition.notify_all()

    def expired(self) -> bool:
        """True when nothing of this batch should be begun any more."""
        return self.cancelled or (self.deadline is not None and time.monotonic() >= self.deadline)

    def cancel(self) -> None:
        """Ask that what has not begun be skipped; returns at once."""
        self.cancelled = True

    @property
    def done(self) -> bool:
        """True when every block has an outcome and the memory is the caller's again."""
        return self._left == 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `done`, at most `timeout_s` seconds; returns `done`."""
        with self._condition:
            return self._condition.wait_for(lambda: self._left == 0, timeout_s)

    @property
    def outcomes(self) -> list[Outcome]:
        """One outcome a block, in the order of the batch; `LATE` for what has not ended."""
        return [Outcome(Status.LATE, "still under way") if o is None else o for o in self._outcomes]


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what became of every block it was asked for or given.

    Attributes:
        num_blocks: Blocks it holds.
        held_bytes: Bytes they take, overhead included.
        capacity_bytes: The most it may take.
        hit: Blocks given.
        stored: Blocks taken, those that were there already included.
        miss: Blocks that were not there.
        refused: Blocks not taken for want of room.
        late: Blocks that came after their deadline, or were not begun before it.
        damaged: Blocks found damaged, each a miss.
        mismatch: Blocks whose key was there with other tokens or extras, each a miss.
        failed: Blocks the operating system refused to read or write, each a miss.
        evicted: Blocks given up to make room.
        read_bytes: Payload read.
        written_bytes: Payload written.
        moved_bytes: Payload written again by compaction.
    """

    num_blocks: int = 0
    held_bytes: int = 0
    capacity_bytes: int = 0
    hit: int = 0
    stored: int = 0
    miss: int = 0
    refused: int = 0
    late: int = 0
    damaged: int = 0
    mismatch: int = 0
    failed: int = 0
    evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    moved_bytes: int = 0


class Counters:
    """Counts for `TierStats`, by the name of its field; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something other than an outcome."""
        with self._lock:
            self._counts[name] += count

    def outcome(self, outcome: Outcome, num_bytes: int) -> Outcome:
        """Count what became of a block of `num_bytes` and return it."""
        with self._lock:
            self._counts[outcome.status.value] += 1
            if outcome.status is Status.HIT:
                self._counts["read_bytes"] += num_bytes
        return outcome

    def stats(self, num_blocks: int, held_bytes: int, capacity_bytes: int) -> TierStats:
        """Return the counts beside what the tier holds now."""
        with self._lock:
            return TierStats(num_blocks, held_bytes, capacity_bytes, **self._counts)


Batch = Sequence[tuple[Entry, Pieces]]


@runtime_checkable
class Tier(Protocol):
    """A store of blocks. Every call may come from any thread, none waits longer than it was allowed to.

    A tier keeps what it was given until it needs the room; it may lose a block at any time and then says MISS. It never
    gives bytes that were not stored under this key with these tokens and extras.
    """

    name: str
    identity: Identity

    def exists(self, ids: Sequence[BlockId]) -> list[bool]:
        """Say which blocks a `get` would probably find; never waits for a device."""

    def get(self, batch: Batch, *, deadline_s: float | None = None, notify: Notify | None = None) -> Ticket:
        """Start reading blocks into memory.

        Args:
            batch: Entries as the caller believes them to be (compared with what is stored), and where to put the bytes.
            deadline_s: What has not begun by then is LATE; None waits as long as it takes.
            notify: Called as each block ends.

        Returns:
            A ticket with HIT for each block whose memory holds exactly the stored bytes. The memory of any other block
            may hold anything.
        """

    def put(self, batch: Batch, *, deadline_s: float | None = 0.0, notify: Notify | None = None) -> Ticket:
        """Start storing blocks.

        Args:
            batch: Entries and their bytes; a block that is there already counts as STORED and is not written again.
            deadline_s: How long a full tier may make the caller wait for room before REFUSED; 0 never waits.
            notify: Called as each block ends.
        """

    def drop(self, ids: Sequence[BlockId]) -> int:
        """Forget blocks, for good; returns how many were there."""

    def flush(self, timeout_s: float) -> bool:
        """Make everything taken so far durable, within a time; returns whether all of it is."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush and release everything, within a time; returns what `flush` said. Further calls do nothing."""

    def stats(self) -> TierStats:
        """Return the counters."""

    def check(self) -> None:
        """Verify the invariants; raises `TierError` naming the first that fails."""


def memory(address: int, num_bytes: int) -> memoryview:
    """Return memory at an address as writable bytes; the caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def reason(error: OSError) -> str:
    """Return what the system said, in words."""
    return error.strerror or str(error)


def payload_bytes(pieces: Pieces) -> int:
    """Sum the bytes of a block's pieces."""
    return sum(size for _, size in pieces)
