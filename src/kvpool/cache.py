"""KVCache: ledger, pools and kernels wired together; nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from kvpool import ops
from kvpool.backends import Attention, get_backend
from kvpool.codecs import Counts
from kvpool.errors import LayoutError, PlanError, UnsupportedError
from kvpool.kinds import StateKind
from kvpool.ledger import Event, Evicted, Ledger, Media, Pin, Retention, Stats, StepDecision
from kvpool.ledger.extras import Extra, encode
from kvpool.plan import Plan
from kvpool.pools import Constants, LayerParts, Part, Pools, View
from kvpool.pools.calibration import calibrate_layer
from kvpool.pools.constants import apply_scales, read_scales, set_layer, set_unit_scales
from kvpool.sequence import Sequence
from kvpool.step import Step, StepBuffers
from kvpool.tiers.base import TierStats
from kvpool.tiers.below import Below, open_below, tier_options
from kvpool.tiers.elastic import Elastic, ResizeResult


class KVCache:
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
    ) -> None:
        self.plan = plan
        self.device = device
        self.backend = get_backend(backend, device, num_threads)
        self.pools = Pools(plan, device, touch=touch)
        self._tiers = tier_options(plan, host_size, disk, disk_size, model)
        self._below: Below | None = None
        self.ledger = Ledger(plan, clock=clock or time.monotonic, policy=policy, offer=self._tiers is not None)
        self._layers = tuple(LayerParts.of(self.pools, layer) for layer in range(plan.spec.num_layers))
        first = StepBuffers(plan, device)
        self._buffers = (first, StepBuffers(plan, device, share=first))
        for buffers in self._buffers:
            self.backend.prepare(self.pools, buffers)
        self._turn = 0
        self._open_steps = 0
        self._elastic = Elastic(plan, self.ledger, self.pools, self.backend, self._save, lambda: self._open_steps > 0)
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
        if self._tiers is None:
            return Sequence(self.ledger, handle)
        below = self.below
        below.opened(handle)
        return Sequence(self.ledger, handle, below)

    def step(
        self,
        items: SequenceOf[tuple[Sequence, int]],
        *,
        drafts: Mapping[Sequence, tuple[SequenceOf[int], SequenceOf[int] | None]] | None = None,
        commit: bool = True,
        pad_to: tuple[int, int] | None = None,
    ) -> Step:
        """Open a step: match, allocate all or nothing, copy what is written while shared, fill the tensors.

        Args:
            items: `(sequence, most tokens to compute)`, served in this order.
            drafts: For a sequence whose last token is in this step, tokens to compute behind it and which draft each
                follows (-1: the last known token; None: each the one before). None is kept unless `accept` says so.
            commit: Make filled blocks matchable when the step ends.
            pad_to: (sequences, tokens) to give the tensors, whatever the step has; rows behind it write nothing.

        Raises:
            OutOfBlocks: Not all sequences fit; nothing has changed.
        """
        buffers = self._buffers[self._turn]
        given = {seq.id: entry for seq, entry in drafts.items()} if drafts else None
        decision = self._begin([(seq.id, most) for seq, most in items], buffers, given, commit)
        self._turn ^= 1
        self._open_steps += 1
        for group, copies in decision.copies_by_group():
            self.backend.copy(self.pools, group, copies)
        step = Step(buffers, decision, self._close, pad_to)
        self.backend.begin(step)
        return step

    def _begin(
        self,
        items: list[tuple[int, int]],
        buffers: StepBuffers,
        drafts: Mapping[int, tuple[SequenceOf[int], SequenceOf[int] | None]] | None,
        commit: bool,
    ) -> StepDecision:
        while True:
            ready = items if self._below is None else self._below.ready(items)
            decision = self._elastic.retry(
                lambda: self.ledger.begin_step(ready, buffers.arrays, drafts=drafts, commit=commit)  # noqa: B023
            )
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
        handles = [(seq.id, most) for seq, most in items]
        if self._below is not None:
            self._below.announce(handles)
        return self._elastic.fits(handles)

    def _close(self, step: Step, failed: bool) -> None:
        self._open_steps -= 1
        if failed:
            self.ledger.abort_step(step.decision)
            if self._below is not None:
                for admission in step.decision.admitted:
                    self._below.opened(admission.sequence)
        else:
            self.ledger.end_step(step.decision)

    def extend(self, step: Step, token_ids: torch.Tensor | SequenceOf[int]) -> None:
        """Append one token to every sequence the step has a sample for.

        Args:
            token_ids: `[num_samples]`, in the order of `step.sample_seqs`.
        """
        ids = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else list(token_ids)
        if len(ids) != step.num_samples:
            raise LayoutError(f"extend needs one token a sample: {step.num_samples}, got {len(ids)}")
        self.ledger.extend(step.decision, ids)

    def accept(self, sequence: Sequence, indices: SequenceOf[int]) -> None:
        """Keep these drafts of the last step, in order, and drop the rest; their slots move in all planes and layers.

        Args:
            sequence: One that had drafts in the step that just ended.
            indices: Positions in its drafts; each one's parent is the one before it, the first's the last known token.
        """
        moves: dict[int, list[tuple[int, int]]] = {}
        for move in self.ledger.accept(sequence.id, indices):
            moves.setdefault(move.group, []).append((move.src, move.dst))
        for group, slots in moves.items():
            self.backend.move(self.pools, group, slots)

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

    # --- per layer ------------------------------------------------------------------------------------------

    def write(
        self,
        layer: int,
        step: Step,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        latent: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        """Store what a layer computed for the step's tokens.

        Args:
            layer: Model layer.
            k: `[T, H, D]`, after rotary embedding.
            v: `[T, H, Dv]`.
            latent: `[T, 1, rank]`, for MLA.
            rope: `[T, 1, rope]`, for MLA.
            index: `[T, 1, Di]` indexer keys.

        Raises:
            LayoutError: A tensor does not fit the plan.
        """
        parts = self._layers[layer]
        if k is not None and v is not None and parts.v is not None:
            ops.write(self.backend, (*parts.k, parts.v), (k, v), step)
        elif latent is not None and rope is not None and parts.k:
            tensors = (latent, rope) if len(parts.k) == 2 else (torch.cat([latent, rope], -1),)
            ops.write(self.backend, parts.k, tensors, step)
        elif index is None:
            raise LayoutError(
                f"layer {layer} stores {self.plan.spec.layers[layer].kinds}; give k and v, or latent and rope"
            )
        if index is not None:
            if parts.index is None:
                raise LayoutError(f"layer {layer} stores no indexer keys")
            ops.write(self.backend, (parts.index,), (index,), step)

    def attend(
        self,
        layer: int,
        step: Step,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the step's rows to everything their sequences hold at this layer, this step included.

        Args:
            layer: Model layer.
            q: `[T, Q, D]`; for MLA in absorbed form, `D = rank + rope`.
            scale: Factor on the logits; default `D ** -0.5`.
            softcap: `c * tanh(x / c)` on scaled logits.
            sinks: `[Q]`, an extra logit in the denominator.
            indices: `[T, K]` int64 slots a row may see, -1 invalid.
            return_lse: Also return the log-sum-exp `[T, Q]` (fp32, natural log).
            out: `[T, Q, Dv]` to fill.

        Returns:
            `out`, or `(out, lse)`.
        """
        parts = self._layers[layer]
        if parts.v is None:
            raise LayoutError(f"layer {layer} has no attention")
        options = Attention(
            parts.default_scale if scale is None else scale,
            parts.lifetime,
            softcap or 0.0,
            sinks,
            indices,
            step.tree,
        )
        result, lse = ops.attend(self.backend, q, parts.k, parts.v, parts.v_dim, step, options, out, return_lse)
        return result if lse is None else (result, lse)

    def score(self, layer: int, step: Step, q: torch.Tensor, weights: torch.Tensor, topk: int) -> torch.Tensor:
        """Pick the tokens that matter most to every row of the step, by its indexer keys.

        Args:
            layer: Model layer with indexer keys.
            q: `[T, Hi, Di]` indexer queries.
            weights: `[T, Hi]` factor of each head.
            topk: Tokens wanted.

        Returns:
            `[T, topk]` int64 slots for `attend(indices=...)`, best first; -1 where a row sees fewer.
        """
        part = self._layers[layer].index
        if part is None:
            raise LayoutError(f"layer {layer} stores no indexer keys")
        return ops.score(self.backend, q, weights, part, step, self._layers[layer].lifetime, topk)

    def state_read(self, layer: int, step: Step, name: str) -> torch.Tensor:
        """Return the recurrent states the step's sequences start from: `[S, *shape]`, zeros for a new sequence.

        Args:
            layer: Model layer.
            step: An open step.
            name: `conv`, `ssm`, or another name of the layer's states.
        """
        part, shape = self._state(layer, name)
        return ops.state_read(part, shape, step.groups[part.group].read_slots)

    def state_write(self, layer: int, step: Step, name: str, states: torch.Tensor) -> None:
        """Store the states `[S, *shape]` the step's sequences end in, in fresh slots: a failed step changes none."""
        part, shape = self._state(layer, name)
        ops.state_write(part, shape, step.groups[part.group].write_slots, states)

    def state(self, layer: int, step: Step, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(read view, read slots, write view, write slots)` of a state in a plain format.

        The views are `[B, *shape]` on the pool itself; the slots `[S]` int32, -1 for a sequence that has none yet.

        Raises:
            UnsupportedError: The state's codec is not plain; use `state_read` and `state_write`.
        """
        part, shape = self._state(layer, name)
        if len(part.planes) > 1 or part.codec.quantised:
            raise UnsupportedError(f"state {name!r} is stored as {part.codec.name}; use state_read and state_write")
        view = part.planes["data"].tensor[:, 0, 0].view(-1, *shape)
        tables = step.groups[part.group]
        return view, tables.read_slots, view, tables.write_slots

    def _state(self, layer: int, name: str) -> tuple[Part, tuple[int, ...]]:
        for kind in self.plan.spec.layers[layer].kinds:
            if isinstance(kind, StateKind) and kind.name == name:
                return self.pools.part(layer, name), kind.shape
        raise LayoutError(f"layer {layer} keeps no state {name!r}")

    def gather(self, layer: int, step: Step) -> tuple[torch.Tensor, ...]:
        """Return everything the step's sequences hold at a layer, decoded and ragged, this step included.

        Returns:
            `(k, v, indptr)`, or `(latent, indptr)`, or `(latent, rope, indptr)`: fp32 `[tokens, H, D]` of all sequences
            one after another; `indptr [S + 1]` int64. Tokens that fell out of a window are zeros.
        """
        parts = self._layers[layer]
        if parts.v is None:
            raise PlanError(f"layer {layer} stores no keys")
        tables, n = step.groups[parts.v.group], parts.v.tokens_per_block
        lengths = tables.seq_lens.long()
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
        indptr[1:] = lengths.cumsum(0)
        row = torch.repeat_interleave(lengths)  # [tokens]: its sequence
        token = torch.arange(int(indptr[-1]), device=lengths.device) - indptr[row]
        block = tables.block_table[row, token // n].long()
        slots = torch.where(block >= 0, block * n + token % n, -1)
        return (*self._read((*parts.k, parts.v), slots), indptr)

    def take(self, layer: int, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """Return what slots hold at a layer, decoded: `(k, v)` or `(latent, rope)`, each `[n, H, D]`.

        Args:
            layer: Model layer.
            slots: `[n]` int64 in the layer's group; -1 gives zeros.
            dtype: Of the result.
        """
        parts = self._layers[layer]
        if parts.v is None:
            raise PlanError(f"layer {layer} stores no keys")
        out = self._read((*parts.k, parts.v), slots, dtype)
        return out if len(out) == 2 else (out[0][..., : parts.v_dim], out[0][..., parts.v_dim :])

    def take_index(self, layer: int, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the indexer keys at slots `[n]` int64, decoded, `[n, 1, Di]`; zeros for -1."""
        part = self._layers[layer].index
        if part is None:
            raise PlanError(f"layer {layer} stores no indexer keys")
        return self._read((part,), slots, dtype)[0]

    def view(self, layer: int, part: str, heads: slice = slice(None)) -> View:
        """Return a layer's pool as strided tensors for other libraries' kernels; see `kvpool.pools.View`.

        Args:
            layer: Model layer.
            part: `kv`, `k`, `v`, `latent`, `rope`, `index`, or a state's name.
            heads: KV heads wanted.
        """
        return self.pools.view(layer, part, heads)

    def read(self, layer: int, sequence: Sequence) -> tuple[torch.Tensor, ...]:
        """Return what a layer holds of a sequence, decoded: `(k, v)` or `(latent, rope)`, fp32 `[tokens, H, D]`."""
        parts = self._layers[layer]
        if parts.v is None:
            raise PlanError(f"layer {layer} stores no keys")
        table, length = self.ledger.table(sequence.id, parts.v.group)
        n = parts.v.tokens_per_block
        token = torch.arange(length)
        block = torch.tensor(table, dtype=torch.int64)[token // n]
        slots = torch.where(block >= 0, block * n + token % n, -1).to(self.device)
        return self._read((*parts.k, parts.v), slots)

    def _read(
        self, parts: Iterable[Part], slots: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, ...]:
        """Decode the tokens at `slots` of each part once, in order."""
        out = []
        for part in dict.fromkeys(parts):
            out.append(torch.empty((len(slots), part.num_heads, part.vector.dim), dtype=dtype, device=slots.device))
            self.backend.read(part, slots, out[-1])
        return tuple(out)

    # --- constants ------------------------------------------------------------------------------------------

    def set_constants(
        self,
        layer: int,
        *,
        k: float | None = None,
        v: float | None = None,
        latent: float | None = None,
        rope: float | None = None,
        smoothing: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        rotation: bool | Mapping[str, bool] | None = None,
    ) -> None:
        """Set numbers the layer's codecs need and do not store; the first write freezes them.

        Args:
            layer: Model layer.
            k: Decode scale of the keys, for codecs with a constant one.
            v: Decode scale of the values.
            latent: Decode scale of the latent.
            rope: Decode scale of the rope part, when it has a codec of its own.
            smoothing: `[H, D]`, divided out of the keys (or the latent) at write and folded into q at read; or a
                mapping from part to tensor.
            rotation: Rotate the quantised parts; or a mapping from part to bool.

        Raises:
            PlanError: A value is out of range or of no use to the codec, or the constants are frozen.
        """
        scales = {"k": k, "v": v, "latent": latent, "rope": rope}
        set_layer(self._constants(layer), scales, smoothing, rotation)

    def set_scales(self, scales: str | Path | Mapping[tuple[int, str], float]) -> None:
        """Set the scale of every part whose codec needs one.

        Args:
            scales: `unit` for 1.0 wherever none is set; a safetensors checkpoint with `k_scale` and `v_scale`; or
                decode scales by (layer, `k` or `v`).

        Raises:
            PlanError: The checkpoint holds none, or a value is refused.
            PlanMismatch: A part that needs a scale has none there.
        """
        if scales == "unit":
            set_unit_scales(self.pools.constants)
        else:
            apply_scales(self.pools.constants, scales if isinstance(scales, Mapping) else read_scales(scales))

    def calibrate(
        self,
        batch: Mapping[int, Mapping[str, torch.Tensor]],
        *,
        smoothing: bool = False,
        rotation: bool | None = None,
    ) -> None:
        """Measure constants on what layers wrote for a piece of real text.

        Args:
            batch: By layer: `k` and `v`, or `latent` and `rope`, each `[T, H, D]`; `q` (`[T, Q, D]`) makes the
                smoothing better.
            smoothing: Measure smoothing of the keys, too.
            rotation: Set rotation of the quantised parts before the scales are measured.

        Raises:
            PlanError: A sample is empty or not finite, a layer stores no such part, or the constants are frozen.
        """
        for layer, tensors in batch.items():
            calibrate_layer(self._constants(layer), tensors, smoothing=smoothing, rotation=rotation)

    def lost(self) -> dict[tuple[int, str], Counts]:
        """Return what constant scales lost so far, by (layer, part): saturated, flushed and non-finite elements."""
        constants = self.pools.constants
        return {key: self.backend.counts(self.pools.part(*key)) for key, c in constants.items() if c.needs_scale}

    def _constants(self, layer: int) -> dict[str, Constants]:
        source = self.plan.source_layer(layer)
        return {part: constants for (at, part), constants in self.pools.constants.items() if at == source}

    def resize(self, budget: int | str) -> ResizeResult:
        """Change the memory of the cache between steps: groups keep their shares, sequences and addresses stay.

        Args:
            budget: Bytes or text such as `2GiB`; at most the plan's `max_budget`.

        Raises:
            PlanError: No addresses were reserved for so much, or it holds no block of some group.
        """
        return self._elastic.resize(budget)

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
            self._below = open_below(self.plan, self.pools, self.ledger, self._tiers)
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

    def check(self) -> None:
        """Verify every invariant of the ledger; raises `KVError` naming the first that fails."""
        self.ledger.check()
        self._elastic.check()
        if self._below is not None:
            self._below.check()
