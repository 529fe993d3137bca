"""The logical ledger: which blocks belong to which sequence, what can be shared, what goes first. Integers only."""

from __future__ import annotations

from kvpool.ledger.arrays import GroupArrays, StepArrays
from kvpool.ledger.decisions import (
    Admission,
    BlockCopy,
    DraftRows,
    Evicted,
    GroupStats,
    Onboard,
    Pin,
    Resized,
    SequenceStats,
    SlotMove,
    Stats,
    StepDecision,
)
from kvpool.ledger.events import Event
from kvpool.ledger.extras import Media
from kvpool.ledger.ledger import Ledger
from kvpool.ledger.policies import POLICIES, Policy, Released
from kvpool.ledger.retention import Retention

__all__ = [
    "POLICIES",
    "Admission",
    "BlockCopy",
    "DraftRows",
    "Event",
    "Evicted",
    "GroupArrays",
    "GroupStats",
    "Ledger",
    "Media",
    "Onboard",
    "Pin",
    "Policy",
    "Released",
    "Resized",
    "Retention",
    "SequenceStats",
    "SlotMove",
    "Stats",
    "StepArrays",
    "StepDecision",
]
