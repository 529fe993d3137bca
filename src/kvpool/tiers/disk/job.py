"""One block on its way to or from a tier that works behind its caller's back."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.tiers.base import Counters, Entry, Outcome, Pieces, Ticket, payload_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One block of a batch, and who is told what became of it.

    Attributes:
        ticket: Of the batch.
        index: Its place there.
        entry: What it is.
        pieces: Memory its bytes come from or go to; the tier's until `end`.
        counters: Of the tier.
    """

    ticket: Ticket
    index: int
    entry: Entry
    pieces: Pieces
    counters: Counters

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return payload_bytes(self.pieces)

    def end(self, outcome: Outcome) -> None:
        """Count and tell what became of it."""
        self.ticket.finish(self.index, self.counters.outcome(outcome, self.num_bytes))
