"""A growing list of tokens and the blocks that hold what was computed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

from kvpool.ledger import Ledger


class Watch(Protocol):
    """Who must know what becomes of sequences: the tiers below the device."""

    def opened(self, sequence: int) -> None:
        """A sequence waits for a step."""

    def paused(self, sequence: int) -> None:
        """A sequence holds nothing any more and will be back."""

    def forked(self, sequence: int, fork: int) -> None:
        """A sequence has a copy, which waits for a step if it does."""

    def rewound(self, sequence: int) -> None:
        """A sequence has lost its last tokens."""

    def released(self, sequence: int) -> None:
        """A sequence is gone."""


def _at_once(work: Callable[[], None]) -> None:
    work()


class Sequence:
    """One sequence of a cache. Release it, or use it as a context manager.

    Args:
        ledger: The ledger that keeps it.
        id: Its id there.
        watch: Told of it when it waits again, and when it is released.
        make_room: Does something that a group may have too few blocks for, after others have given theirs where needed.

    Attributes:
        released: Whether it has been released.
    """

    __slots__ = ("_make_room", "_watch", "id", "ledger", "released")

    def __init__(
        self,
        ledger: Ledger,
        id: int,
        watch: Watch | None = None,
        make_room: Callable[[Callable[[], None]], None] = _at_once,
    ) -> None:
        self.ledger = ledger
        self._watch = watch
        self._make_room = make_room
        self.id = id
        self.released = False

    def __repr__(self) -> str:
        return f"Sequence({self.id}{', released' if self.released else ''})"

    def __len__(self) -> int:
        """Known tokens, computed or not."""
        return self.ledger.num_tokens(self.id)

    @property
    def tokens(self) -> list[int]:
        """Token ids, in order."""
        return self.ledger.tokens(self.id)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix tree; 0 before the first step."""
        return self.ledger.num_cached_tokens(self.id)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return self.ledger.num_computed_tokens(self.id)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append known tokens, to be computed by the next step that names this sequence."""
        ids = list(token_ids)
        self._make_room(lambda: self.ledger.append(self.id, ids))

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens; their blocks go back to the front of the free list."""
        self.ledger.rewind(self.id, num_tokens)
        if self._watch is not None:
            self._watch.rewound(self.id)

    def fork(self) -> Sequence:
        """Return a new sequence with the same tokens that shares all blocks."""
        fork = self.ledger.fork(self.id)
        if self._watch is not None:
            self._watch.forked(self.id, fork)
        return Sequence(self.ledger, fork, self._watch, self._make_room)

    def pause(self) -> None:
        """Hold nothing, but leave what is computed matchable; tiers below take its whole blocks at once."""
        self.ledger.pause(self.id)
        if self._watch is not None:
            self._watch.paused(self.id)

    def resume(self) -> None:
        """Wait for a step again; it finds what the device or a tier still has and computes the rest."""
        self.ledger.resume(self.id)
        if self._watch is not None:
            self._watch.opened(self.id)

    def release(self, keep: bool = True) -> None:
        """Give the blocks back; `keep` leaves what is computed matchable. Doing it twice is no error."""
        if not self.released:
            self.ledger.release(self.id, keep=keep)
            self.released = True
            if self._watch is not None:
                self._watch.released(self.id)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
