"""Every error kvpool raises on purpose.

    KVError
    +-- SpecError          a model configuration cannot be understood, or has no KV cache
    +-- PlanError          a plan cannot be made from these numbers
    +-- LayoutError        a tensor does not have the declared shape, dtype, device or strides
    +-- OutOfBlocks        a step or sequence needs more blocks than can be had
    +-- UnsupportedError   no backend does this combination (a row of the support matrix)
    +-- PlanMismatch       a block, constants or a directory belong to another plan or model
    +-- TierError          a tier failed in a way that is not a miss

A message says what was wrong, the value received, what is allowed, and the nearest fix.
"""

from __future__ import annotations


class KVError(Exception):
    """Base of all errors raised by kvpool."""


class SpecError(KVError, ValueError):
    """A model configuration cannot be understood, or describes no KV cache."""


class PlanError(KVError, ValueError):
    """A plan cannot be made from these numbers."""


class LayoutError(KVError, ValueError):
    """A tensor does not have the declared shape, dtype, device or strides."""


class OutOfBlocks(KVError, RuntimeError):
    """More blocks are needed than can be had.

    Args:
        message: The numbers: needed, available, and what would make room.
        sequences: Ids of the sequences that did not fit, in the order they were given.
        missing: Blocks that are missing, by group, and below 0 what a group has to spare; empty when no number of
            blocks would help.
    """

    def __init__(self, message: str, sequences: tuple[int, ...] = (), missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sequences = sequences
        self.missing = missing


class UnsupportedError(KVError, NotImplementedError):
    """No backend supports this combination of kind, codec, layout and option."""


class PlanMismatch(KVError, ValueError):
    """Blocks or constants belong to another plan, model or rank.

    Args:
        message: What was compared.
        fields: Names of the differing fields.
    """

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class TierError(KVError, OSError):
    """A tier failed in a way that is not a miss."""
