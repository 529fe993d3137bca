"""The rows of a dense batch as sequences of a cache: which go on, which are released, which are opened."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from kvpool.cache import KVCache
from kvpool.errors import LayoutError, UnsupportedError
from kvpool.ledger import Retention
from kvpool.sequence import Sequence


class Rows:
    """A batch, padded on the left, and one sequence for each of its rows.

    Args:
        cache: Where the sequences live.
        salt: Of every sequence that is opened.
        retention: Of every sequence that is opened.

    Attributes:
        uncached: So many last tokens of a sequence that is opened are not looked for.
        ids: `[B, columns]` int64, what `sequences` hold, padding included.
        mask: `[B, columns]` bool, False for padding.
        sequences: One a row; None for a row that is all padding so far.
        tails: Row -> tokens at its end that its sequence was not given yet.

    Invariants: outside `follow` and with no tails, sequence `b` has exactly the tokens `ids[b][mask[b]]`.
    """

    def __init__(self, cache: KVCache, salt: str | bytes | None, retention: SequenceOf[Retention]) -> None:
        self._cache = cache
        self.salt = salt
        self.retention = tuple(retention)
        self.uncached = 0
        self.sequences: list[Sequence | None] = []
        self.tails: dict[int, list[int]] = {}
        self.ids = torch.empty((0, 0), dtype=torch.int64)
        self.mask = torch.empty((0, 0), dtype=torch.bool)

    @property
    def columns(self) -> int:
        """Columns of the batch."""
        return self.ids.shape[1]

    def _open(self, tokens: list[int], uncached: int = 0, held_back: int = 0) -> Sequence:
        uncached = max(uncached, self.uncached - held_back)
        limit = max(len(tokens) - uncached, 0) if uncached else None
        return self._cache.sequence(tokens, salt=self.salt, retention=self.retention, max_cached_tokens=limit)

    def whole(self, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask of whole rows; with a mask longer than the ids, the rows held come before them.

        Raises:
            LayoutError: The mask does not fit the ids, or what is held.
        """
        ids = ids.detach().to("cpu", torch.int64)
        if mask is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        if mask.dim() != 2 or mask.shape[0] != ids.shape[0]:
            raise LayoutError(f"attention_mask must be [B, columns], got {list(mask.shape)} for {list(ids.shape)} ids")
        mask = mask.detach().to("cpu", torch.bool)
        before = mask.shape[1] - ids.shape[1]
        if before < 0:
            raise LayoutError(f"attention_mask covers {mask.shape[1]} columns, the ids alone have {ids.shape[1]}")
        if before > self.columns or (before and len(self.ids) != len(ids)):
            raise LayoutError(
                f"attention_mask speaks of {before} columns before these ids; this cache holds {list(self.ids.shape)}:"
                " pass the whole rows"
            )
        return (torch.cat([self.ids[:, :before], ids], 1) if before else ids), mask

    def follow(self, ids: torch.Tensor, mask: torch.Tensor, hold_back: Callable[[int], int]) -> None:
        """Become the batch `ids`: rows that it continues go on, others are released and opened anew.

        Args:
            hold_back: Given the tokens of all rows that are opened, how many last ones of each go into `tails`.

        Raises:
            LayoutError: Padding does not stand on the left.
            OutOfBlocks: A row can never fit.
        """
        if not self._extend(ids, mask):
            self._restart(ids, mask, hold_back)

    def _extend(self, ids: torch.Tensor, mask: torch.Tensor) -> bool:
        """Append the new columns if all rows go on from what they are; return whether they do."""
        known = self.columns
        if not self.sequences or len(ids) != len(self.sequences) or ids.shape[1] < known:
            return False
        if not (torch.equal(ids[:, :known], self.ids) and torch.equal(mask[:, :known], self.mask)):
            return False
        if ids.shape[1] == known and not all(s is None or s.num_computed_tokens < len(s) for s in self.sequences):
            return False
        check_padding(mask[:, max(known - 1, 0) :])
        for b, (sequence, tokens) in enumerate(zip(self.sequences, ids[:, known:].tolist(), strict=True)):
            if sequence is not None:
                sequence.extend(tokens)
                continue
            shown = [t for t, m in zip(tokens, mask[b, known:].tolist(), strict=True) if m]
            self.sequences[b] = self._open(shown) if shown else None
        self.ids, self.mask = ids, mask
        return True

    def _restart(self, ids: torch.Tensor, mask: torch.Tensor, hold_back: Callable[[int], int]) -> None:
        check_padding(mask)
        wanted = [row[shown].tolist() for row, shown in zip(ids, mask, strict=True)]
        kept: list[Sequence | None] = [None] * len(wanted)
        for b, sequence in enumerate(self.sequences):
            if sequence is None:
                continue
            if b < len(wanted) and _begins(sequence, wanted[b]):
                sequence.extend(wanted[b][len(sequence) :])
                kept[b] = sequence
            else:
                sequence.release()
        self.sequences, self.ids, self.mask = kept, ids, mask
        new = {b: tokens for b, tokens in enumerate(wanted) if tokens and kept[b] is None}
        held_back = hold_back(sum(map(len, new.values())))
        for b, tokens in new.items():
            cut = len(tokens) - held_back if len(tokens) > held_back else len(tokens)
            kept[b] = self._open(tokens[:cut], held_back=len(tokens) - cut)
            if cut < len(tokens):
                self.tails[b] = tokens[cut:]

    def crop(self, num_columns: int) -> None:
        """Forget the last columns of every row."""
        for b, sequence in enumerate(self.sequences):
            if sequence is not None:
                self.sequences[b] = self._rewound(sequence, num_columns)
        self.forget(num_columns)

    def forget(self, num_columns: int) -> None:
        """Forget last columns that no sequence has."""
        self.ids, self.mask = self.ids[:, : self.columns - num_columns], self.mask[:, : self.columns - num_columns]

    def _rewound(self, sequence: Sequence, num_tokens: int) -> Sequence:
        """Rewind; where a window gave back what that needs, open the row anew: what is gone is computed again."""
        try:
            sequence.rewind(num_tokens)
        except UnsupportedError:
            tokens = sequence.tokens[: len(sequence) - num_tokens]
            sequence.release()
            return self._open(tokens, uncached=1)
        return sequence

    def select(self, sources: list[int]) -> None:
        """Make row `i` what row `sources[i]` was; rows named twice share their blocks."""
        old, taken = self.sequences, set[int]()
        rows: list[Sequence | None] = []
        for b in sources:
            sequence = old[b]
            rows.append(sequence if sequence is None or b not in taken else sequence.fork())
            taken.add(b)
        for b, sequence in enumerate(old):
            if sequence is not None and b not in taken:
                sequence.release(keep=False)
        index = torch.tensor(sources, dtype=torch.int64)
        self.sequences, self.ids, self.mask = rows, self.ids[index], self.mask[index]

    def release(self) -> None:
        """Release every row; what was computed stays known to later ones until its blocks are needed."""
        for sequence in self.sequences:
            if sequence is not None:
                sequence.release()
        self.sequences, self.ids, self.mask = [], self.ids[:0, :0], self.mask[:0, :0]
        self.tails.clear()


def check_padding(mask: torch.Tensor) -> None:
    """Raise `LayoutError` unless padding stands on the left."""
    if (mask[:, 1:] < mask[:, :-1]).any():
        raise LayoutError("padding must stand on the left of a row; use a tokenizer with padding_side='left'")


def _begins(sequence: Sequence, tokens: list[int]) -> bool:
    """Whether the sequence can go on to `tokens` and has something left to compute."""
    length = len(sequence)
    return length <= len(tokens) and sequence.num_computed_tokens < len(tokens) and sequence.tokens == tokens[:length]
