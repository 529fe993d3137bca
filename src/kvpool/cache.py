"""KVCache: ledger, pools and kernels wired together; nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from kvpool.errors import KVError, LayoutError, OutOfBlocks, PlanError
from kvpool.layer_access import LayerAccess
from kvpool.ledger import Event, Evicted, Ledger, Media, Pin, Retention, Stats, StepDecision
from kvpool.ledger.extras import Extra, encode
from kvpool.plan import Plan
from kvpool.sequence import Sequence
from kvpool.step import Step, StepBuffers
from kvpool.tiers.base import TierStats
from kvpool.tiers.below import Below, open_below
from kvpool.tiers.elastic import Elastic, ResizeResult
from kvpool.tiers.options import tier_options


class KVCache(LayerAccess):
    """A paged cache for one model on one device.

    Args:
        plan: Every shape and size.
        device: `cpu`.
        backend: `auto`, or a name; a name never falls back.
        num_threads: Threads of the kernels, for a backend with threads of its own; by default `KVPOOL_THREADS`, else
            the CPUs of this process.
        clock: Seconds, monotonic; for retention.
        touch: Fault all committed memory in now, so that no step does.
        scales: Decode scales for codecs that need constant ones; see `set_scales`.
        host_size: Host memory for blocks that are evicted.
        disk: Directory for blocks that outlive the process.
        disk_size: The most it may take.
        model: What tells these weights from all others; needed with a disk, as blocks are of use to no other model.
        host_codec: Format of the blocks below the device, smaller than the device's; what comes back has its error.

    Attributes:
        has_tiers: There are tiers below the device.

    Invariants: no address, stride or capacity changes while the cache lives; one thread opens steps.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "cpu",
        backend: str = "auto",
        num_threads: int | None = None,
        clock: Callable[[], float] | None = None,
        policy: str = "lru",
        touch: bool = False,
        scales: str | Path | Mapping[tuple[int, str], float] | None = None,
        host_size: int | str | None = None,
        disk: str | Path | None = None,
        disk_size: int | str | None = None,
        model: str = "",
        host_codec: str | None = None,
    ) -> None:
        super().__init__(plan, device, backend, num_threads=num_threads, touch=touch)
        self._tiers = tier_options(plan, host_size, disk, disk_size, model, host_codec)
        self.has_tiers = self._tiers is not None
        self._below: Below | None = None
        self.ledger = Ledger(plan, clock=clock or time.monotonic, policy=policy, offer=self._tiers is not None)
        self._turn = 0
        self._open: list[Step] = []
        self._unknown: list[Step] = []  # whose samples `extend` was not told; oldest first
        self._elastic = Elastic(plan, self.ledger, self.pools, self.backend, self._save, lambda: bool(self._open))
        if scales is not None:
            self.set_scales(scales)

    # --- sequences and steps --------------------------------------------------------------------------------

    def sequence(
        self,
        tokens: Iterable[int],
        *,
        salt: str | bytes | None = None,
        lora_id: int | str | None = None,
        media: SequenceOf[Media] = (),
        retention: SequenceOf[Retention] = (),
        max_cached_tokens: int | None = None,
    ) -> Sequence:
        """Register a prompt; it is matched and given blocks by the first step that names it.

        Args:
            tokens: Token ids.
            salt: Only sequences with the same salt share blocks.
            lora_id: Adapter the keys were computed with.
            media: Keys of media items inside the prompt.
            retention: Priorities of token ranges after release.
            max_cached_tokens: Match at most so many tokens.
        """
        ids = tokens if isinstance(tokens, list) else list(tokens)
        handle = self._elastic.retry(
            lambda: self.ledger.open(
                ids,
                salt=salt,
                lora_id=lora_id,
                media=media,
                retention=retention,
                max_cached_tokens=max_cached_tokens,
            )
        )
        below = None if self._tiers is None else self.below
        if below is not None:
            below.opened(handle)
        return Sequence(self.ledger, handle, below, self._elastic.retry)

    def step(
        self,
        items: SequenceOf[tuple[Sequence, int]],
        *,
        drafts: Mapping[Sequence, tuple[SequenceOf[int], SequenceOf[int] | None]] | None = None,
        commit: bool = True,
        pad_to: tuple[int, int] | None = None,
        start: bool = True,
    ) -> Step:
        """Open a step: match, allocate all or nothing, copy what is written while shared, fill the tensors.

        Two may be open. They run and end in the order they were opened, and if one fails the next is cancelled.

        Args:
            items: `(sequence, most tokens to compute)`, served in this order.
            drafts: For a sequence whose last token is in this step, tokens to compute behind it and which draft each
                follows (-1: the last known token; None: each the one before). None is kept unless `accept` says so.
            commit: Make filled blocks matchable when the step ends.
            pad_to: (sequences, tokens) to give the tensors, whatever the step has; rows behind it write nothing.
            start: Touch the device now; else whoever runs the step calls its `start`, after the one before has run.

        Raises:
            OutOfBlocks: Not all sequences fit; nothing has changed.
            KVError: A token is not known and was not sampled by the last step; `resolve` it first.
        """
        buffers = self._buffers[self._turn]
        given = {self._handle(seq): entry for seq, entry in drafts.items()} if drafts else None
        decision = self._begin(self._handles(items), buffers, given, commit)
        try:
            last = self._unknown[-1] if self._unknown else None
            after = last if last is not None and buffers.point_at_samples(decision, last.decision) else None
            step = Step(buffers, decision, self._close, pad_to, self._carry_out, after)
        except Exception:
            self._abort(decision)
            raise
        self._turn ^= 1
        self._open.append(step)
        if start:
            try:
                step.start()
            except BaseException:
                step.close(failed=True)
                raise
        return step

    def _carry_out(self, step: Step) -> None:
        for group, copies in step.decision.copies_by_group():
            self.backend.copy(self.pools, group, copies)
        self.backend.begin(step)

    def _handle(self, sequence: Sequence) -> int:
        """Return a sequence's id in this cache's ledger; `KVError` for one of another cache, whose ids are others."""
        if sequence.ledger is not self.ledger:
            raise KVError(f"{sequence!r} belongs to another cache; open it with this cache's sequence(...)")
        return sequence.id

    def _handles(self, items: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, int]]:
        ledger = self.ledger  # this runs for every sequence of every step: no call for those that are its own
        return [(seq.id if seq.ledger is ledger else self._handle(seq), most) for seq, most in items]

    def _begin(
        self,
        items: list[tuple[int, int]],
        buffers: StepBuffers,
        drafts: Mapping[int, tuple[SequenceOf[int], SequenceOf[int] | None]] | None,
        commit: bool,
    ) -> StepDecision:
        while True:
            ready = items if self._below is None else self._below.ready(items)
            try:
                decision = self._elastic.retry(
                    lambda: self.ledger.begin_step(ready, buffers.arrays, drafts=drafts, commit=commit)  # noqa: B023
                )
            except OutOfBlocks:
                # Others may have been to share what those left out hold or compute: they are computed now.
                if self._below is None or not self._below.forgo(items):
                    raise
                continue
            if self._below is None or self._below.carry_out(decision):
                return decision
            self.ledger.abort_step(decision)

    def _save(self, evicted: tuple[Evicted, ...]) -> None:
        if self._below is not None:
            self._below.transfer.save(evicted)

    def fits(self, items: SequenceOf[tuple[Sequence, int]]) -> int:
        """Return how many leading items a step would take now; changes nothing.

        Args:
            items: As for `step`.
        """
        handles = self._handles(items)
        if self._below is None:
            return self._elastic.fits(handles)
        # What is still on its way may come or not: there must be room for either.
        self._below.announce(handles, comes=True)
        count = self._elastic.fits(handles)
        self._below.announce(handles, comes=False)
        return self._elastic.fits(handles[:count])

    def _close(self, step: Step, failed: bool) -> None:
        if failed:
            self._abort(step.decision)
        else:
            self.ledger.end_step(step.decision)
            self._open.remove(step)
        self._elastic.settle()

    def _abort(self, decision: StepDecision) -> None:
        """Undo a step and those opened after it."""
        self.ledger.abort_step(decision)
        gone = [step for step in self._open if step.decision.step >= decision.step]
        self._open = [step for step in self._open if step not in gone]
        self._unknown = [step for step in self._unknown if step not in gone]
        for step in gone:
            step.open = False
        if self._below is not None:
            for undone in [step.decision for step in gone] or [decision]:
                for admission in undone.admitted:
                    self._below.opened(admission.sequence)

    def extend(self, step: Step, token_ids: torch.Tensor | SequenceOf[int] | None) -> None:
        """Append one token to every sequence the step has a sample for.

        Args:
            token_ids: `[num_samples]`, in the order of `step.sample_seqs`. None for tokens that are known later: the
                next step takes them from `step.next_ids`, and `resolve` says what they are.
        """
        if token_ids is None:
            self.ledger.extend(step.decision, None)
            self._unknown.append(step)
        else:
            self.ledger.extend(step.decision, _samples(step, token_ids))

    def resolve(self, step: Step, token_ids: torch.Tensor | SequenceOf[int]) -> None:
        """Say what the tokens are that `extend(step, None)` appended; after the step's end only if all of them live.

        Args:
            token_ids: `[num_samples]`, in the order of `step.sample_seqs`.
        """
        if step not in self._unknown:
            raise KVError("resolve needs a step that extend(step, None) was called for, once")
        self.ledger.resolve(step.decision, _samples(step, token_ids))
        self._unknown.remove(step)

    def accept(self, sequence: Sequence, indices: SequenceOf[int]) -> None:
        """Keep these drafts of the last step, in order, and drop the rest; their slots move in all planes and layers.

        Args:
            sequence: One that had drafts in the step that just ended.
            indices: Positions in its drafts; each one's parent is the one before it, the first's the last known token.
        """
        moves: dict[int, list[tuple[int, int]]] = {}
        for move in self.ledger.accept(self._handle(sequence), indices):
            moves.setdefault(move.group, []).append((move.src, move.dst))
        for group, slots in moves.items():
            self.backend.move(self.pools, group, slots)

    def read(self, layer: int, sequence: Sequence) -> tuple[torch.Tensor, ...]:
        """Return what a layer holds of a sequence, decoded: `(k, v)` or `(latent, rope)`, fp32 `[tokens, H, D]`."""
        parts = self._at(layer)
        if parts.v is None:
            raise PlanError(f"layer {layer} stores no keys")
        table, length = self.ledger.table(self._handle(sequence), parts.v.group)
        n = parts.v.tokens_per_block
        token = torch.arange(length)
        block = torch.tensor(table, dtype=torch.int64)[token // n]
        slots = torch.where(block >= 0, block * n + token % n, -1).to(self.device)
        return self._read((*parts.k, parts.v), slots)

    # --- the prefix tree ------------------------------------------------------------------------------------

    def peek(self, tokens: Iterable[int], *, salt: Extra = None, lora_id: Extra = None) -> int:
        """Return how many leading tokens of a prompt would be found now; nothing is held or touched."""
        return self.ledger.peek(list(tokens), salt=salt, lora_id=lora_id)

    def pin(self, tokens: Iterable[int], *, salt: Extra = None, lora_id: Extra = None) -> Pin:
        """Keep the stored whole blocks of a prefix from being evicted or moved until `unpin`."""
        return self.ledger.pin(list(tokens), salt=salt, lora_id=lora_id)

    def unpin(self, pin: Pin) -> None:
        """Let a pinned prefix go."""
        self.ledger.unpin(pin)

    def clear(self, salt: Extra = None) -> None:
        """Forget what is stored under a salt, or everything; what is in use is dropped when it is released."""
        self.ledger.clear(salt)
        if self._below is not None:
            self._below.clear(None if salt is None else encode(salt))

    def reset(self) -> None:
        """Release every sequence and forget everything: all blocks are free and constants may be set anew.

        Raises:
            PlanError: There are tiers below the device: what they keep depends on the constants.
        """
        if self._below is not None:
            raise PlanError("a cache with tiers cannot be reset: its constants are part of what they keep; use clear()")
        self.ledger.reset()
        for constants in self.pools.constants.values():
            constants.thaw()
        self.backend.forget()

    def events(self) -> list[Event]:
        """Return what became of stored blocks since the last call, in order."""
        return self.ledger.events()

    # --- tiers below ----------------------------------------------------------------------------------------

    @property
    def below(self) -> Below:
        """The tiers below the device; opening them, by the first sequence, freezes all constants.

        Raises:
            PlanError: The cache was made without tiers.
        """
        if self._tiers is None:
            raise PlanError("this cache has no tiers below its device; make it with host_size= or disk=")
        if self._below is None:
            self._below = open_below(self.plan, self.pools, self.ledger, self.backend, self._tiers)
        return self._below

    def tier_stats(self) -> dict[str, TierStats]:
        """Return the counters of the tiers below the device, by name; none before the first sequence."""
        return {} if self._below is None else self._below.stats()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Bring what the prefix tree holds to disk, within a time; returns whether all of it is there."""
        return self._below is None or self._below.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush and close the tiers, within a time; returns whether everything was kept. Use it no more."""
        return self._below is None or self._below.close(timeout_s)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- whole cache ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the counters of the ledger (a frozen dataclass)."""
        return self.ledger.stats()

    def resize(self, budget: int | str) -> ResizeResult:
        """Change the memory of the cache: groups keep their shares, sequences and addresses stay.

        Nothing moves under a step. With steps open the result says `waiting`; the resize happens when the last of them
        ends, and `resized` says what it reached.

        Args:
            budget: Bytes or text such as `2GiB`; at most the plan's `max_budget`.

        Raises:
            PlanError: No addresses were reserved for so much, or it holds no block of some group.
        """
        return self._elastic.resize(budget)

    @property
    def resized(self) -> ResizeResult | None:
        """What the last `resize` reached; None before the first was carried out."""
        return self._elastic.resized

    def check(self) -> None:
        """Verify every invariant of the ledger; raises `KVError` naming the first that fails."""
        self.ledger.check()
        self._elastic.check()
        if self._below is not None:
            self._below.check()


def _samples(step: Step, token_ids: torch.Tensor | SequenceOf[int]) -> list[int]:
    ids = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else list(token_ids)
    if len(ids) != step.num_samples:
        raise LayoutError(f"a step needs one token a sample: {step.num_samples}, got {len(ids)}")
    return ids
