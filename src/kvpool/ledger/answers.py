"""What a ledger can be asked; nothing here changes it, but that events are taken."""

from __future__ import annotations

from kvpool import _native
from kvpool.errors import KVError
from kvpool.ledger.decisions import Evicted, GroupStats, SequenceStats, Stats
from kvpool.ledger.events import KINDS, Event
from kvpool.ledger.extras import media_of


class Answers:
    """The questions of `Ledger`; any thread may ask."""

    _core: _native.Ledger
    _results: _native.Results

    def keys(self, sequence: int) -> list[bytes]:
        """Return the identities of its whole blocks: 16 bytes each, chained, equal in every process."""
        return self._core.keys(sequence)

    def extras(self, sequence: int) -> list[bytes]:
        """Return what the identity of each whole block depends on besides tokens; empty bytes for nothing."""
        return self._core.extras(sequence)

    def matched(self, sequence: int) -> int:
        """Return how many leading whole blocks a waiting sequence would find in the tree now."""
        return self._core.matched(sequence)

    def in_tree(self, sequence: int) -> list[bytes]:
        """Return, by group, a 1 for each whole block that a waiting sequence could have and the tree holds, else a 0.

        It is as long as a match may be. Of a state group a block is the checkpoint at its end.
        """
        return self._core.in_tree(sequence)

    def stored(self) -> tuple[Evicted, ...]:
        """Return every whole block of the tree, parents before children: what tiers below may keep too."""
        return self._core.stored(self._results)

    def tokens(self, sequence: int) -> list[int]:
        """Return its token ids; -1 for one not known yet."""
        tokens: list[int] = self._core.tokens(sequence).tolist()
        return tokens

    def sequence_stats(self, sequence: int) -> SequenceStats:
        """Return where its tokens came from."""
        return SequenceStats(*self._core.sequence(sequence))

    def num_tokens(self, sequence: int) -> int:
        """Return how many tokens it has, computed or not."""
        return self._core.num_tokens(sequence)

    def num_cached_tokens(self, sequence: int) -> int:
        """Return how many of its tokens were found in the tree at admission."""
        return self._core.num_cached(sequence)

    def num_computed_tokens(self, sequence: int) -> int:
        """Return how many of its tokens are held, cached ones included."""
        return self._core.num_computed(sequence)

    def table(self, sequence: int, group: int = 0) -> tuple[list[int], int]:
        """Return (block table, computed tokens) of a sequence; -1 = not held."""
        return self._core.block_table(sequence, group).tolist(), self.num_computed_tokens(sequence)

    def state(self, sequence: int, group: int) -> int | None:
        """Return the slot of a state group that holds the sequence's state, or None before its first step."""
        slot = self._core.state(sequence, group)
        return None if slot < 0 else slot

    def events(self) -> list[Event]:
        """Take the events since the last call, oldest first."""
        return [
            Event(number, KINDS[kind], group, block, None if to < 0 else to, key, parent, start,
                  tokens, priority, salt, lora, media_of(extras, start))
            for number, kind, group, block, to, key, parent, start, tokens, priority, salt, lora, extras
            in self._core.events()
        ]  # fmt: skip

    def stats(self) -> Stats:
        """Return the counters and where the blocks are."""
        found = self._core.stats()
        groups = tuple(GroupStats(*row) for row in found.pop("groups"))
        return Stats(**found, groups=groups)

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            KVError: Naming what does not hold.
        """
        wrong = self._core.check()
        if wrong:
            raise KVError("the ledger is inconsistent: " + "; ".join(wrong))
