"""How often what was kept is found again, by how often it was found before: what is worth a copy at eviction."""

from __future__ import annotations

from kvpool.tiers.base import BlockId

#: Uses from here on count as one kind.
MAX_USES = 4
#: A kind is judged after so many samples, which then count half.
SAMPLES = 1024
#: Every so manieth block is watched, and kept whatever its kind.
EVERY = 8
#: Copying a block down and up costs about a hundredth of computing it, or less; below this rate it is not worth it.
MIN_RATE = 0.002


class HitValue:
    """Hit rates of blocks kept at eviction, by kind: the number of times a block was found before it was evicted.

    A sample is watched until it is found or pushed out by newer ones. A kind with too few hits is not kept any more,
    but for the samples, so that its rate is known when the load changes.
    """

    def __init__(self, min_rate: float = MIN_RATE) -> None:
        self.min_rate = min_rate
        self._watched: dict[BlockId, int] = {}
        self._samples = [0.0] * (MAX_USES + 1)
        self._hits = [0.0] * (MAX_USES + 1)
        self._count = 0

    def rate(self, uses: int) -> float:
        """Return the share of watched blocks of a kind that were found again; 1 while nothing is known."""
        kind = min(uses, MAX_USES)
        return self._hits[kind] / self._samples[kind] if self._samples[kind] else 1.0

    def admit(self, block: BlockId, uses: int) -> bool:
        """Say whether a block that was found `uses` times is worth keeping."""
        kind = min(uses, MAX_USES)
        self._count += 1
        if self._count % EVERY == 0:
            self._watch(block, kind)
            return True
        return self._samples[kind] < SAMPLES or self.rate(kind) >= self.min_rate

    def hit(self, block: BlockId) -> None:
        """Note that a block was found in a tier."""
        kind = self._watched.pop(block, None)
        if kind is not None:
            self._end(kind, 1.0)

    def _watch(self, block: BlockId, kind: int) -> None:
        self._watched[block] = kind
        if len(self._watched) > 8 * SAMPLES:
            oldest = next(iter(self._watched))
            self._end(self._watched.pop(oldest), 0.0)

    def _end(self, kind: int, hit: float) -> None:
        if self._samples[kind] >= 2 * SAMPLES:
            self._samples[kind] /= 2
            self._hits[kind] /= 2
        self._samples[kind] += 1
        self._hits[kind] += hit
