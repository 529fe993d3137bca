"""What happened to blocks, in order: enough to fill the messages vLLM and TensorRT-LLM publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpool.ledger.extras import Media

EventKind = Literal["stored", "removed", "moved", "updated", "cleared"]
KINDS: tuple[EventKind, ...] = ("stored", "removed", "moved", "updated", "cleared")


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one block.

    Attributes:
        number: Ascending without gaps; a gap means that the ring was full and events were lost.
        kind: `stored` (matchable), `removed` (no longer), `moved` (to another id), `updated` (priority), `cleared`.
        group: Group of the plan.
        block: Block id.
        to: Its new id, when moved.
        key: Identity of the block: 16 bytes, the same in every process.
        parent: Identity of the block before it; None for a first block.
        start: First token's position in its sequences.
        token_ids: What it holds.
        priority: 0..100.
        salt: As given to `open`, encoded; empty for none.
        lora_id: As given to `open`, encoded; empty for none.
        media: Items that the block overlaps, each with its place in the sequence; keys encoded.
        tier: Where: the ledger itself speaks of the device only.
    """

    number: int
    kind: EventKind
    group: int
    block: int
    to: int | None
    key: bytes
    parent: bytes | None
    start: int
    token_ids: tuple[int, ...]
    priority: int
    salt: bytes
    lora_id: bytes
    media: tuple[Media, ...] = ()
    tier: str = "device"
