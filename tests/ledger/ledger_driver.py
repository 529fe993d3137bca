"""An engine of a few lines: runs steps through a ledger and writes token-coded pages, so that content is verified."""

from __future__ import annotations

from kvpool.ledger import Ledger, StepArrays, StepDecision
from kvpool.plan import Plan


class Driver:
    """Keeps one code a slot and group: what was written there. Reads it back for every row of every step."""

    def __init__(self, plan: Plan, **options: object) -> None:
        self.plan = plan
        self.ledger = Ledger(plan, **options)  # type: ignore[arg-type]
        self.buffers = [StepArrays.from_plan(plan), StepArrays.from_plan(plan)]
        self.turn = 0
        self.pages: list[dict[int, object]] = [{} for _ in plan.groups]
        self.arrays = self.buffers[0]
        self.salts: dict[int, object] = {}

    def open(self, tokens: list[int], **options: object) -> int:
        seq = self.ledger.open(tokens, **options)  # type: ignore[arg-type]
        self.salts[seq] = (options.get("salt"), options.get("lora_id"), options.get("media", ()))
        return seq

    def begin(self, items: list[tuple[int, int]], **options: object) -> StepDecision:
        self.arrays = self.buffers[self.turn]
        decision = self.ledger.begin_step(items, self.arrays, **options)  # type: ignore[arg-type]
        self.turn ^= 1
        self.copy(decision)
        self.write(decision)
        self.read(decision)
        return decision

    def copy(self, decision: StepDecision) -> None:
        for c in decision.copies:
            n = self.plan.groups[c.group].tokens_per_block
            page = self.pages[c.group]
            for i in range(c.num_tokens):
                page[c.dst * n + i] = page[c.src * n + i]
            for i in range(c.num_tokens, n):
                page[c.dst * n + i] = "garbage"

    def code(self, seq: int, tokens: list[int], position: int) -> object:
        return (self.salts[seq], tuple(tokens[: position + 1]))

    def write(self, decision: StepDecision) -> None:
        a = self.arrays
        for r, seq in enumerate(decision.sequences):
            tokens = self.ledger.tokens(seq)
            for row in range(a.cu_seqlens[r], a.cu_seqlens[r + 1]):
                position = int(a.positions[row])
                assert a.token_ids[row] == tokens[position]
                for g, group in enumerate(self.plan.groups):
                    if not group.is_state:
                        self.pages[g][int(a.groups[g].slots[row])] = self.code(seq, tokens, position)

    def read(self, decision: StepDecision) -> None:
        a = self.arrays
        for r, seq in enumerate(decision.sequences):
            tokens = self.ledger.tokens(seq)
            first = int(a.positions[a.cu_seqlens[r]])
            for g, group in enumerate(self.plan.groups):
                if group.is_state:
                    continue
                n = group.tokens_per_block
                length = int(a.groups[g].seq_lens[r])
                for position in self.seen(g, first, length):
                    block = int(a.groups[g].block_table[r, position // n])
                    assert block >= 0, (seq, g, position)
                    assert self.pages[g][block * n + position % n] == self.code(seq, tokens, position)
                assert (a.groups[g].block_table[r, -(-length // n) :] == -1).all()
        rows = len(decision.sequences)
        assert int(a.cu_seqlens[rows]) == decision.total_tokens
        for g, group in enumerate(self.plan.groups):
            assert (a.groups[g].seq_lens[rows:] == 0).all()
            if not group.is_state:
                assert (a.groups[g].slots[decision.total_tokens :] == -1).all()

    def seen(self, g: int, first: int, length: int) -> list[int]:
        """Positions any row of [first, length) reads."""
        life = self.plan.groups[g].lifetime
        assert life is not None
        low = 0
        if life.window is not None:
            low = max(0, first - life.window + 1)
        elif life.chunk is not None:
            low = first // life.chunk * life.chunk
        return [p for p in range(length) if p >= low or p < life.sink_tokens]

    def step(self, *items: tuple[int, int], **options: object) -> StepDecision:
        decision = self.begin(list(items), **options)
        self.ledger.end_step(decision)
        self.ledger.check()
        return decision

    def prefill(self, tokens: list[int], **options: object) -> tuple[int, StepDecision]:
        seq = self.open(tokens, **options)
        decision = self.step((seq, len(tokens)))
        return seq, decision

    def generate(self, seq: int, *tokens: int) -> None:
        for token in tokens:
            self.ledger.extend([seq], [token])
            self.step((seq, 1))

    def blocks(self, seq: int, group: int = 0) -> list[int]:
        return self.ledger.table(seq, group)[0]

    def cached(self, decision: StepDecision, seq: int) -> int:
        return next(a.num_cached_tokens for a in decision.admitted if a.sequence == seq)
