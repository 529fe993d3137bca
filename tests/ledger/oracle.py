"""A ledger of other construction: prefixes in a dictionary, time stamps instead of lists, copies instead of undo.

One group of unlimited lifetime, one step at a time. Slow and short; the native ledger must answer the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

Prefix = tuple[object, tuple[int, ...]]  # (salt, all tokens up to and with this block)


@dataclass(eq=False)
class Cell:
    """One block. `prefix` is set while it is stored."""

    refs: int = 1
    prefix: Prefix | None = None
    stamp: float = 0
    born: int = 0
    pending: bool = False
    taken: bool = False


@dataclass(eq=False)
class Life:
    salt: object
    tokens: list[int]
    cells: list[Cell] = field(default_factory=list)
    stored: int = 0  # leading whole blocks that are in the tree
    computed: int = 0
    admitted: bool = False


class Full(Exception):
    pass


class Oracle:
    def __init__(self, tokens_per_block: int, num_blocks: int) -> None:
        self.n, self.free = tokens_per_block, num_blocks
        self.tree: dict[Prefix, Cell] = {}
        self.lives: dict[int, Life] = {}
        self.clock, self.front, self.births, self.evicted = 0, 0, 0, 0

    # --- looking

    def children(self, parent: Prefix) -> list[Cell]:
        """Stored blocks right behind `parent`, newest first."""
        salt, tokens = parent
        depth = len(tokens)
        if depth % self.n:  # a partly filled block leads nowhere
            return []
        found = [
            c
            for (s, t), c in self.tree.items()
            if s == salt and depth < len(t) <= depth + self.n and t[:depth] == tokens
        ]
        return sorted(found, key=lambda c: -c.born)

    def cached(self) -> int:
        return sum(c.refs == 0 for c in self.tree.values())

    def match(self, salt: object, tokens: list[int], limit: int) -> tuple[list[Cell], Cell | None, int]:
        path: list[Cell] = []
        while (len(path) + 1) * self.n <= limit:
            cell = self.tree.get((salt, tuple(tokens[: (len(path) + 1) * self.n])))
            if cell is None or cell.taken:
                break
            path.append(cell)
        at = len(path) * self.n
        best, best_common = None, 0
        for c in self.children((salt, tuple(tokens[:at])))[:32]:
            assert c.prefix is not None
            if c.pending:
                continue
            own, mine = c.prefix[1][at:], tokens[at : min(limit, at + self.n)]
            common = next(
                (i for i, (a, b) in enumerate(zip(own, mine, strict=False)) if a != b), min(len(own), len(mine))
            )
            if c.taken:
                common = min(common, self.n - 1)
            if common > best_common:
                best, best_common = c, common
        return path, best, best_common

    def peek(self, tokens: list[int], salt: object = None) -> int:
        path, _, common = self.match(salt, tokens, len(tokens) - 1)
        return len(path) * self.n + common

    # --- blocks

    def give_back(self, cell: Cell, front: float | None = None) -> None:
        cell.refs -= 1
        if cell.refs:
            return
        if cell.prefix is None:
            self.free += 1
            return
        self.clock += 1
        cell.stamp = self.clock if front is None else front

    def drop(self, cell: Cell) -> None:
        assert cell.prefix is not None
        del self.tree[cell.prefix]
        cell.prefix = None

    def take(self) -> None:
        if self.free:
            self.free -= 1
            return
        leaves = [c for c in self.tree.values() if c.refs == 0 and not self.children(c.prefix)]  # type: ignore[arg-type]
        self.drop(min(leaves, key=lambda c: c.stamp))
        self.evicted += 1

    def store(self, cell: Cell, prefix: Prefix) -> None:
        self.births += 1
        cell.prefix, cell.born = prefix, self.births
        self.tree[prefix] = cell

    # --- operations

    def open(self, seq: int, tokens: list[int], salt: object = None) -> None:
        self.lives[seq] = Life(salt, list(tokens))

    def step(self, items: list[tuple[int, int]], room: int, commit: bool, abort: bool) -> dict[int, int]:
        before = copy.deepcopy(self.__dict__)
        try:
            return self._step(items, room, commit, abort)
        except Full:
            self.__dict__.update(before)
            raise

    def _step(self, items: list[tuple[int, int]], room: int, commit: bool, abort: bool) -> dict[int, int]:
        entries, needed, admitted = [], 0, {}
        for seq, most in items:
            s = self.lives[seq]
            if min(most, room, len(s.tokens) - s.computed) <= 0:
                continue
            was = (s.admitted, s.computed, s.stored, list(s.cells))
            if not s.admitted:
                admitted[seq] = self._admit(s)
            start = s.computed
            end = start + min(most, room, len(s.tokens) - start)
            room -= end - start
            needed += -(-end // self.n) - len(s.cells)
            source = None
            if start % self.n:
                cell = s.cells[start // self.n]
                if cell.prefix is not None:
                    shared = cell.refs > 1 or bool(self.children(cell.prefix)) or cell.pending or cell.taken
                    if shared:
                        source, needed = cell, needed + 1
                    else:
                        cell.taken = True
            filled: list[Cell] = []
            if commit and s.stored == start // self.n:
                for i in range(s.stored, end // self.n):
                    prefix = (s.salt, tuple(s.tokens[: (i + 1) * self.n]))
                    if prefix in self.tree:
                        break
                    cell = Cell(pending=True)
                    self.store(cell, prefix)
                    filled.append(cell)
            s.stored += len(filled)
            entries.append((s, was, start, end, source, filled))
            if needed > self.free + self.cached():
                raise Full
        for s, _, start, end, source, filled in entries:
            self._carry_out(s, start, end, source, filled)
        for s, was, _, end, source, filled in reversed(entries) if abort else entries:
            (self._undo if abort else self._end)(s, was, end, source, filled, commit)
        if not abort:
            for *_, source, _ in entries:
                if source is not None:
                    self.give_back(source)
        return admitted

    def _admit(self, s: Life) -> int:
        path, partial, common = self.match(s.salt, s.tokens, len(s.tokens) - 1)
        s.cells = path + ([partial] if partial else [])
        for c in s.cells:
            c.refs += 1
        s.stored, s.computed, s.admitted = len(path), len(path) * self.n + common, True
        return s.computed

    def _carry_out(self, s: Life, start: int, end: int, source: Cell | None, filled: list[Cell]) -> None:
        if start % self.n and s.cells[start // self.n].taken:
            s.cells[start // self.n].taken = False
            self.drop(s.cells[start // self.n])
        while len(s.cells) < -(-end // self.n):
            self.take()
            s.cells.append(Cell())
        if source is not None:
            self.take()
            s.cells[start // self.n] = Cell()
        for at, place in enumerate(filled):  # the block takes the place that was kept for it in the tree
            real = s.cells[s.stored - len(filled) + at]
            assert place.prefix is not None
            real.prefix, real.born, real.pending = place.prefix, place.born, True
            real.refs += place.refs - 1
            self.tree[place.prefix] = filled[at] = real
            for other in self.lives.values():
                other.cells = [real if c is place else c for c in other.cells]

    def _end(self, s: Life, was: object, end: int, source: Cell | None, filled: list[Cell], commit: bool) -> None:
        s.computed = end
        for cell in filled:
            cell.pending = False
        if commit:
            self._commit(s)

    def _commit(self, s: Life) -> None:
        for i in range(s.stored, s.computed // self.n):
            prefix = (s.salt, tuple(s.tokens[: (i + 1) * self.n]))
            stored = self.tree.get(prefix)
            if stored is not None and stored.pending:
                break
            if stored is None:
                self.store(s.cells[i], prefix)
            elif stored is not s.cells[i]:
                stored.refs += 1
                self.give_back(s.cells[i])
                s.cells[i] = stored
            s.stored = i + 1

    def _undo(
        self,
        s: Life,
        was: tuple[bool, int, int, list[Cell]],
        end: int,
        source: Cell | None,
        filled: list[Cell],
        _: bool,
    ) -> None:
        for cell in filled:
            cell.pending = False
            self.drop(cell)
        admitted, computed, stored, cells = was
        if source is not None:
            at = next(i for i in range(len(s.cells)) if i == (s.computed // self.n))
            self.give_back(s.cells[at])
            s.cells[at] = source
        keep = len(cells) if admitted else len(s.cells)
        if admitted:
            while len(s.cells) > keep:
                self.give_back(s.cells.pop())
        else:
            extra = -(-s.computed // self.n)
            while len(s.cells) > extra:
                self.give_back(s.cells.pop())
            for c in reversed(s.cells):
                self.give_back(c)
            s.cells = []
        s.admitted, s.computed, s.stored = admitted, computed, stored

    def release(self, seq: int, keep: bool) -> None:
        s = self.lives.pop(seq)
        if not s.admitted:
            return
        if keep:
            self._commit(s)
            tail = s.computed % self.n
            at = s.stored * self.n
            if tail and at + tail == s.computed and s.cells[s.stored].prefix is None:
                text = tuple(s.tokens[: s.computed])
                said = [c for c in self.children((s.salt, text[:at]))[:32] if c.prefix[1][: len(text)] == text]  # type: ignore[index]
                if not any(not c.pending for c in said):
                    self.store(s.cells[s.stored], (s.salt, text))
        for c in reversed(s.cells):
            self.give_back(c)

    def extend(self, seq: int, token: int) -> None:
        self.lives[seq].tokens.append(token)

    def rewind(self, seq: int, count: int) -> None:
        s = self.lives[seq]
        s.tokens = s.tokens[: len(s.tokens) - count]
        position = min(s.computed, len(s.tokens))
        if position == s.computed:
            return
        run, s.cells = s.cells[-(-position // self.n) :], s.cells[: -(-position // self.n)]
        self.front -= len(run) + 1
        child: Cell | None = None
        front, at = True, self.front
        for c in reversed(run):
            below = self.children(c.prefix) if c.prefix is not None else []
            front = front and (not below or (child is not None and below == [child]))
            at += 1
            stored = c.prefix is not None
            self.give_back(c, at if front else None)
            child = c if stored else None
        s.computed, s.stored = position, min(s.stored, position // self.n)
