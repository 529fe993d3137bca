"""How long released tokens are worth keeping: priorities and durations of token ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Priority of tokens no range names.
DEFAULT_PRIORITY = 35
#: Stands for "to the end of the sequence".
NO_END = 2**62


@dataclass(frozen=True, slots=True)
class Retention:
    """A priority for the blocks that hold any token of `[start, end)`; of several ranges the first one wins.

    Attributes:
        start: First token.
        end: One past the last; None for all that follow, generated ones too.
        priority: 0..100; lower goes first, 35 is the default.
        duration: Seconds after release; then the blocks fall back to 35. None for ever.
    """

    start: int
    end: int | None
    priority: int
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ValueError(f"Retention needs 0 <= start < end, got [{self.start}, {self.end})")
        if not 0 <= self.priority <= 100:
            raise ValueError(f"Retention.priority must be 0..100, got {self.priority}")
        if self.duration is not None and not self.duration > 0:
            raise ValueError(f"Retention.duration must be positive seconds or None, got {self.duration}")


def encode_ranges(ranges: Sequence[Retention]) -> list[tuple[int, int, int, float]]:
    """Return `(start, end, priority, duration)` rows for the core; a duration of -1 never ends."""
    return [
        (r.start, NO_END if r.end is None else r.end, r.priority, -1.0 if r.duration is None else float(r.duration))
        for r in ranges
    ]
