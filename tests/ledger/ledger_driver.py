"""An engine of a few lines: runs steps through a ledger and writes token-coded pages, so that content is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.ledger import Ledger, SlotMove, StepArrays, StepDecision
from kvpool.plan import Plan


class Driver:
    """Keeps one code a slot and group: what was written there. Checks it for everything any row of a step reads."""

    def __init__(self, plan: Plan, **options: Any) -> None:
        self.plan = plan
        self.ledger = Ledger(plan, **options)
        self.buffers = [StepArrays.from_plan(plan), StepArrays.from_plan(plan)]
        self.turn = 0
        self.pages: list[dict[int, object]] = [{} for _ in plan.groups]
        self.arrays = self.buffers[0]
        self.names: dict[int, object] = {}
        self.truth: dict[int, list[int]] = {}  # its tokens, also those the ledger does not know yet
        self.store: dict[tuple[int, bytes], list[object]] = {}  # a tier below

    def open(self, tokens: Sequence[int], **options: Any) -> int:
        seq = self.ledger.open(list(tokens), **options)
        self.truth[seq] = list(tokens)
        self.names[seq] = (options.get("salt"), options.get("lora_id"), options.get("media", ()))
        return seq

    def fork(self, seq: int) -> int:
        child = self.ledger.fork(seq)
        self.names[child] = self.names[seq]
        self.truth[child] = list(self.truth[seq])
        return child

    def extend(self, seq: int, token: int, known: bool = True) -> None:
        self.ledger.extend([seq], [token] if known else None)
        self.truth[seq].append(token)

    def rewind(self, seq: int, num_tokens: int) -> None:
        self.ledger.rewind(seq, num_tokens)
        self.tokens(seq)

    def resolve(self, seq: int) -> None:
        self.ledger.resolve([seq], [self.truth[seq][self.ledger.sequence_stats(seq).num_known]])

    def tokens(self, seq: int) -> tuple[int, ...]:
        """The truth, cut to what the ledger has, which must agree where it knows."""
        known = self.ledger.tokens(seq)
        del self.truth[seq][len(known) :]
        assert all(a in (b, -1) for a, b in zip(known, self.truth[seq], strict=True))
        return tuple(self.truth[seq])

    def begin(
        self, items: list[tuple[int, int]], drafts: Mapping[int, tuple[list[int], list[int] | None]] | None = None,
        **options: Any,
    ) -> StepDecision:  # fmt: skip
        arrays = self.buffers[self.turn]
        decision = self.ledger.begin_step(items, arrays, drafts=drafts, **options)
        self.arrays = arrays
        self.turn ^= 1
        for e in decision.evicted:
            self.store[e.group, e.key] = self.block(e.group, e.block)
        self.copy(decision)
        for o in decision.onboards:
            n = self.plan.groups[o.group].tokens_per_block
            self.pages[o.group].update(
                zip(range(o.block * n, o.block * n + n), self.store[o.group, o.key], strict=True)
            )
        texts = [self.row_texts(decision, r, drafts or {}) for r in range(len(decision.sequences))]
        for write in (True, False):
            for r in range(len(decision.sequences)):
                for g, group in enumerate(self.plan.groups):
                    (self.run_state if group.is_state else self.run_tokens)(decision, r, g, texts[r], write)
        self.check_padding(decision)
        return decision

    def block(self, g: int, block: int) -> list[object]:
        n = self.plan.groups[g].tokens_per_block
        return [self.pages[g].get(slot) for slot in range(block * n, block * n + n)]

    def copy(self, decision: StepDecision) -> None:
        for c in decision.copies:
            n = self.plan.groups[c.group].tokens_per_block
            page = self.pages[c.group]
            for i in range(n):
                page[c.dst * n + i] = page[c.src * n + i] if i < c.num_tokens else "garbage"

    def row_texts(
        self, decision: StepDecision, r: int, drafts: Mapping[int, tuple[list[int], list[int] | None]]
    ) -> list[tuple[int, ...]]:
        """For every row of a sequence: the tokens up to and with it, along its path of drafts."""
        a, seq = self.arrays, decision.sequences[r]
        tokens = self.tokens(seq)
        rows = range(int(a.cu_seqlens[r]), int(a.cu_seqlens[r + 1]))
        assert len(rows) == a.num_tokens[r]
        texts: list[tuple[int, ...]] = []
        for row in rows:
            parent = int(a.draft_parents[row])
            if parent < 0:
                assert a.token_ids[row] in (tokens[a.positions[row]], -1)
                texts.append(tokens[: a.positions[row] + 1])
            else:
                texts.append((*texts[parent - rows[0]], int(a.token_ids[row])))
                assert len(texts[-1]) == a.positions[row] + 1
        given = drafts.get(seq, ([], None))[0]
        num_drafts = next((d.num_rows for d in decision.drafts if d.sequence == seq), 0)
        assert [t[-1] for t in texts[len(texts) - num_drafts :]] == given[:num_drafts]
        return texts

    def code(self, seq: int, text: tuple[int, ...]) -> object:
        return (self.names[seq], text)

    def run_tokens(self, decision: StepDecision, r: int, g: int, texts: list[tuple[int, ...]], write: bool) -> None:
        a, seq, n = self.arrays, decision.sequences[r], self.plan.groups[g].tokens_per_block
        first = int(a.cu_seqlens[r])
        slots = a.groups[g].slots[first : first + len(texts)].tolist()
        if write:
            for slot, text in zip(slots, texts, strict=True):
                assert slot >= 0
                self.pages[g][slot] = self.code(seq, text)
            return
        length = int(a.groups[g].seq_lens[r])
        table = a.groups[g].block_table[r]
        start = length - len(texts)  # physical places of this step's rows
        assert [table[p // n] * n + p % n for p in range(start, length)] == slots
        for slot, text in zip(slots, texts, strict=True):
            assert self.pages[g][slot] == self.code(seq, text)
        for p in self.seen(g, start):
            assert table[p // n] >= 0, (seq, g, p)
            assert self.pages[g][table[p // n] * n + p % n] == self.code(seq, texts[0][: p + 1])
        assert (table[-(-length // n) :] == -1).all()

    def seen(self, g: int, first: int) -> list[int]:
        """Positions before `first` that a row there reads."""
        life = self.plan.groups[g].lifetime
        assert life is not None
        low = 0
        if life.window is not None:
            low = max(0, first - life.window + 1)
        elif life.chunk is not None:
            low = first // life.chunk * life.chunk
        return [p for p in range(first) if p >= low or p < life.sink_tokens]

    def run_state(self, decision: StepDecision, r: int, g: int, texts: list[tuple[int, ...]], write: bool) -> None:
        a, seq = self.arrays, decision.sequences[r]
        read, written = int(a.groups[g].read_slots[r]), int(a.groups[g].write_slots[r])
        num_drafts = next((d.num_rows for d in decision.drafts if d.sequence == seq), 0)
        if write:
            before = texts[0][:-1]
            assert (self.pages[g][read] == self.code(seq, before)) if before else read == -1
            self.pages[g][written] = self.code(seq, texts[-1 - num_drafts])
            for j in range(num_drafts):
                self.pages[g][int(a.groups[g].draft_slots[r, j])] = self.code(seq, texts[len(texts) - num_drafts + j])
        else:
            assert self.pages[g][written] == self.code(seq, texts[-1 - num_drafts])

    def check_padding(self, decision: StepDecision) -> None:
        a, rows = self.arrays, len(decision.sequences)
        assert int(a.cu_seqlens[rows]) == decision.total_tokens
        assert (a.cu_seqlens[rows:] == decision.total_tokens).all()
        for g, group in enumerate(self.plan.groups):
            assert (a.groups[g].seq_lens[rows:] == 0).all()
            if not group.is_state:
                assert (a.groups[g].slots[decision.total_tokens :] == -1).all()
                assert (a.groups[g].block_table[rows:] == -1).all()

    def move(self, moves: Sequence[SlotMove]) -> None:
        values = [self.pages[m.group][m.src] for m in moves]
        for m, value in zip(moves, values, strict=True):
            self.pages[m.group][m.dst] = value

    def accept(self, seq: int, indices: list[int]) -> None:
        self.move(self.ledger.accept(seq, indices))
        self.truth[seq] += self.ledger.tokens(seq)[len(self.truth[seq]) :]

    def resize(self, group: int, num_blocks: int) -> int:
        done = self.ledger.resize(group, num_blocks)
        for e in done.evicted:
            self.store[e.group, e.key] = self.block(e.group, e.block)
        n = self.plan.groups[group].tokens_per_block
        moved = [(dst, self.block(group, src)) for src, dst in done.moves]
        for dst, values in moved:
            self.pages[group].update(zip(range(dst * n, dst * n + n), values, strict=True))
        for slot in [s for s in self.pages[group] if s >= done.num_blocks * n]:
            del self.pages[group][slot]  # no memory behind it
        return done.num_blocks

    def step(self, *items: tuple[int, int], **options: Any) -> StepDecision:
        decision = self.begin(list(items), **options)
        self.ledger.end_step(decision)
        self.ledger.check()
        return decision

    def prefill(self, tokens: Sequence[int], **options: Any) -> tuple[int, StepDecision]:
        """Open a sequence and compute its prompt, in as many steps as checkpoints ask for."""
        seq = self.open(tokens, **options)
        decision = self.step((seq, len(tokens)))
        while self.ledger.num_computed_tokens(seq) < len(tokens):
            self.step((seq, len(tokens)))
        return seq, decision

    def generate(self, seq: int, *tokens: int) -> None:
        for token in tokens:
            self.extend(seq, token)
            self.step((seq, 1))

    def blocks(self, seq: int, group: int = 0) -> list[int]:
        return self.ledger.table(seq, group)[0]

    def cached(self, decision: StepDecision, seq: int) -> int:
        return next(a.num_cached_tokens for a in decision.admitted if a.sequence == seq)
