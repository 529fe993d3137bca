"""The logical ledger: which blocks belong to which sequence, what can be shared, what goes first. Integers only."""

from __future__ import annotations

from kvpool.ledger.arrays import GroupArrays, StepArrays
from kvpool.ledger.decisions import Admission, BlockCopy, GroupStats, Stats, StepDecision
from kvpool.ledger.extras import Media
from kvpool.ledger.ledger import Ledger
from kvpool.ledger.retention import Retention

__all__ = [
    "Admission",
    "BlockCopy",
    "GroupArrays",
    "GroupStats",
    "Ledger",
    "Media",
    "Retention",
    "Stats",
    "StepArrays",
    "StepDecision",
]
