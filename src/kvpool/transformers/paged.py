"""PagedCache: what `model.generate(ids, cache=PagedCache(model))` runs on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpool.cache import KVCache
from kvpool.dtypes import dtype
from kvpool.errors import KVError, LayoutError, UnsupportedError
from kvpool.kinds import StateKind
from kvpool.ledger import Retention
from kvpool.plan import Plan, make_plan
from kvpool.sequence import Sequence
from kvpool.spec import CacheSpec
from kvpool.step import Step
from kvpool.transformers.dense import DenseMap
from kvpool.transformers.layers import CONV, needs_single_steps
from kvpool.transformers.rows import Rows
from kvpool.transformers.steps import StepCache

#: Rows of an assisted decoding's first forward that are computed even when they are cached: its drafts are among them.
DRAFT_ROWS = 64
#: States kept for drafts by default, where they are columns of convolutions: a few percent of a sequence.
DRAFT_STATES = 31
MODES = ("auto", "kernel", "gather")


class PagedCache(StepCache):
    """A drop-in cache for transformers' `generate`: paged, shared between calls, in any codec.

    Every call finds the longest prefix of its prompts that is still held, and computes the rest. Rows of a batch, beams
    and samples share blocks. Batches are padded on the left.

    Args:
        model: A causal language model.
        budget: Bytes, or text such as `"4GiB"`; by default half of the memory that is free.
        codec: Stored format; by default the model's own dtype.
        layout: Order of the axes in memory.
        tokens_per_block: A power of two.
        backend: `auto`, or a name.
        num_threads: Threads of the kernels; by default `KVPOOL_THREADS`, else the CPUs of this process.
        mode: `kernel` attends to the pages; `gather` hands dense keys and values to the model's own attention; `auto`
            is `kernel` for every model that can.
        salt: Only caches and calls with the same salt share blocks.
        retention: Priorities of token ranges of every prompt, after release.
        plan: A ready plan, instead of the five arguments that describe one.
        cache: A cache that is there, instead of one made here: with tiers below it, for instance. Close it yourself.
        options: More keywords for `make_plan` (`max_seq_len`, `max_sequences`, `max_step_tokens`, ...); `num_draft` is
            the most drafts of assisted decoding for models of convolutions (LFM2), 31 by default: each has a state.

    Raises:
        UnsupportedError: The model, or the mode for this model, is not supported.
        PlanError: The budget is too small.

    Attributes:
        rows: The last batch, a sequence a row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget: int | str | None = None,
        codec: str | Mapping[str, object] | None = None,
        layout: str = "HND",
        tokens_per_block: int = 32,
        backend: str = "auto",
        num_threads: int | None = None,
        mode: str = "auto",
        salt: str | bytes | None = None,
        retention: SequenceOf[Retention] = (),
        plan: Plan | None = None,
        cache: KVCache | None = None,
        **options: Any,
    ) -> None:
        if mode not in MODES:
            raise UnsupportedError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
        if cache is None:
            if plan is None:
                plan = plan_for(model, budget, codec, layout, tokens_per_block, options)
            cache = KVCache(plan, backend=backend, num_threads=num_threads)
        gathers = mode == "gather" or (mode == "auto" and not model._can_set_attn_implementation())
        super().__init__(cache, model, gathers=gathers)
        self.rows = Rows(self.cache, salt, retention)
        self._members: list[Sequence | None] = []  # the rows of the open step, and how many columns they have
        self._columns = 0
        self._slots: dict[int, torch.Tensor] = {}  # of the open step, by group; only when gathering
        self._num_drafts = 0  # last columns that the last forward computed and `crop` has not spoken of yet
        self._single_steps = any(needs_single_steps(layer) for layer in self.cache.plan.spec.layers)
        self._fresh = True

    # --- what generate tells ------------------------------------------------------------------------------------

    @property
    def _is_user_defined(self) -> bool:
        """Set by `generate` on the cache it is given: the start of a call, whose prompt owes nothing to the last."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self.abort()
        self._keep()
        self._fresh = True
        self.rows.uncached = 0
        for layer in self._states:
            layer.record_past = False

    def activate_past_recording(self) -> None:
        """Called when assisted decoding begins.

        The states of convolutions are columns of their input, of which a forward gives one a draft; each is kept until
        `crop` says which drafts go.

        Raises:
            UnsupportedError: The model keeps recurrent states, of which drafts cannot be taken back.
        """
        if any(kind.name != CONV for layer in self._states for kind in layer.kinds):
            raise UnsupportedError(
                f"the recurrent states of {type(self.model).__name__} cannot be rolled back by a few tokens: call"
                " generate without prompt_lookup_num_tokens and without an assistant_model"
            )
        self.rows.uncached = (self._states and self.cache.plan.num_draft + 1) or DRAFT_ROWS
        for layer in self._states:
            layer.record_past = True

    def prepare(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        return self.begin(input_ids, attention_mask)

    def begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Open the step of the next forward.

        Rows that continue what this cache holds go on; others are released, and found again as far as they are known.

        Args:
            input_ids: `[B, n]`, the whole rows; or, with a longer mask, what is new.
            attention_mask: `[B, columns]`, 0 for padding on the left; by default nothing is padded.

        Returns:
            How many last columns the forward must be given: `model(input_ids[:, -n:], ..., cache=cache)`.

        Raises:
            LayoutError: Padding does not stand on the left, or a row is empty.
            OutOfBlocks: The batch does not fit; nothing was computed.
        """
        self.abort()
        self._keep()
        ids, mask = self.rows.whole(input_ids, attention_mask)
        if self.rows.uncached and self._fresh:
            self.rows.release()  # a row that goes on would leave too few columns for the drafts
        try:
            self.rows.follow(ids, mask, self._hold_back)
            self._catch_up()
        except BaseException:
            self.rows.release()
            raise
        self._fresh = False
        return self._begin_step()

    def _hold_back(self, num_tokens: int) -> int:
        """How many last columns the forward of `generate` gets, when this cache runs those before it; 0: it runs none.

        A recurrent state is handed over only at the end of a forward, and rows of different lengths have none in
        common: such models prefill row by row, up to the last column. So do prompts that exceed a step.
        """
        if not self._states and num_tokens <= self.cache.plan.max_step_tokens:
            return 0
        return self.rows.uncached or 1

    def _catch_up(self) -> None:
        """Compute what the forward of `generate` is not to compute."""
        sequences = [s for s in self.rows.sequences if s is not None]
        left = self._hold_back(sum(len(s) - s.num_computed_tokens for s in sequences))
        for b, sequence in enumerate(self.rows.sequences):
            if sequence is None:
                continue
            tail = self.rows.tails.pop(b, [])
            if tail or left:
                self._advance(sequence, len(sequence) if tail else len(sequence) - left)
            sequence.extend(tail)

    @torch.no_grad()
    def _advance(self, sequence: Sequence, until: int) -> None:
        """Run the model over one sequence until so many of its tokens are computed."""
        while sequence.num_computed_tokens < until:
            computed = sequence.num_computed_tokens
            # What the first step of a sequence finds counts as computed only then: one more could be one too many.
            unmatched = computed == 0 and until < len(sequence)
            singly = unmatched or (computed > 0 and self._single_steps)
            step = self.cache.step([(sequence, 1 if singly else until - computed)])
            first = int(step.positions[0])
            if self._single_steps and first > 0 and step.total_tokens > 1:
                step.close(failed=True)
                step = self.cache.step([(sequence, 1)])
                first = int(step.positions[0])
            self._set_step(step, DenseMap(1, step.total_tokens), [sequence], first + step.total_tokens)
            optional = {"position_ids": step.positions[None].long(), "logits_to_keep": 1}
            given = {name: value for name, value in optional.items() if name in self._arguments}
            self.model(input_ids=step.token_ids[None].clone(), use_cache=True, **{self._argument: self}, **given)

    def _begin_step(self) -> int:
        rows = [row for row in self.rows.sequences if row is not None]
        if not rows:
            raise LayoutError("every row of the batch is padding; attention_mask shows no token")
        if self.cache.has_tiers:
            self.cache.below.wait([row.id for row in rows])  # all rows are in one step
        drafts = self._take_drafts(rows)
        step = self.cache.step([(row, len(row)) for row in rows], drafts=drafts)
        if step.num_samples != len(rows):
            step.close(failed=True)
            raise KVError(
                f"{len(rows)} rows do not fit a step of max_step_tokens={self.cache.plan.max_step_tokens} tokens; make"
                " PagedCache with a larger max_step_tokens"
            )
        counts = iter(step.num_tokens.tolist())
        dense = DenseMap.right_aligned([0 if row is None else next(counts) for row in self.rows.sequences])
        self._set_step(step, dense, self.rows.sequences, self.rows.columns)
        return dense.columns

    def _take_drafts(self, rows: list[Sequence]) -> dict[Sequence, tuple[list[int], None]]:
        """Take the tokens behind the next one out of a single row, where each is to have a state of its own."""
        count = len(rows[0]) - rows[0].num_computed_tokens - 1
        recording = any(layer.record_past for layer in self._states)
        self._num_drafts = count if recording and len(rows) == 1 and count <= self.cache.plan.num_draft else 0
        if not self._num_drafts:
            return {}
        drafts = rows[0].tokens[-count:]
        rows[0].rewind(count)
        return {rows[0]: (drafts, None)}

    def _keep(self, num_drafts: int | None = None) -> None:
        """Make the first drafts of the last forward tokens of their row, all by default; the others are gone."""
        drafts, self._num_drafts = self._num_drafts, 0
        if drafts and self.rows.sequences and (row := self.rows.sequences[0]) is not None:
            self.cache.accept(row, range(drafts if num_drafts is None else num_drafts))

    def _set_step(self, step: Step, dense: DenseMap, members: list[Sequence | None], columns: int) -> None:
        self.step, self.dense, self._members, self._columns = step, dense, members, columns

    # --- what the forward needs -----------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a step for a model that was called directly: ids go on from what this cache holds, as ever."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.step is None:
            if not isinstance(ids, torch.Tensor):
                raise UnsupportedError("PagedCache finds prefixes by token ids; pass input_ids")
            mask = kwargs.get("attention_mask")
            if mask is None and len(self.rows.ids) == len(ids):
                mask = torch.cat([self.rows.mask, torch.ones_like(ids, dtype=torch.bool)], 1)
            self.begin(ids, mask)
        assert self.dense is not None
        if isinstance(ids, torch.Tensor) and tuple(ids.shape) != (self.dense.batch, self.dense.columns):
            expected = [self.dense.batch, self.dense.columns]
            self.abort()
            raise LayoutError(f"the open step computes {expected} ids, the model was given {list(ids.shape)}")
        wanted = kwargs.get("logits_to_keep")
        if self.rows.uncached and isinstance(wanted, int) and wanted > (columns := self.dense.columns):
            self.abort()
            fix = "make PagedCache with a larger num_draft" if self._states else "draft fewer"
            raise UnsupportedError(f"{wanted - 1} drafts at once: at most {columns - 1} can be taken back; {fix}")
        for layer in self._states:
            layer.num_drafts = self._num_drafts
        self.load_states()

    def after_forward(self, failed: bool) -> None:
        step = self.step
        try:
            if step is not None:
                self.save_states(failed)
        except BaseException:
            failed = True
            raise
        finally:
            self.step = self.dense = self._stored = None
            self._slots.clear()
            if step is not None:
                step.close(failed=failed)
                if failed:
                    self.rows.forget(self._num_drafts)
                    self._num_drafts = 0

    def abort(self) -> None:
        self.after_forward(failed=True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before those of the running forward; between forwards, all columns held.

        A prompt that `generate` is about to prefill is not cut by what the last call left: `begin` finds what is known.
        """
        if self.dense is not None:
            return self._columns - self.dense.columns
        return 0 if self._fresh else self.rows.columns

    def _gather(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return everything the rows hold, decoded, `[B, H, columns, D]`; zeros where there is nothing."""
        assert self.step is not None
        source = self.cache.plan.source_layer(layer)
        slots = self._dense_slots(self.cache.plan.find(source, "latent" if self._latent[layer] else "k")[0])
        dense = self.cache.take(layer, slots, k.dtype)  # [B * columns, H, D] each
        first, second = (x.view(len(self._members), -1, *x.shape[1:]).transpose(1, 2) for x in dense)
        return first, second

    def _gather_index(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        slots = self._dense_slots(self.cache.plan.find(layer, "index")[0])
        return self.cache.take_index(layer, slots, k.dtype).view(len(self._members), -1, k.shape[-1])

    def _dense_slots(self, group: int) -> torch.Tensor:
        """Return the slot behind every column of the dense batch, `[B * columns]` int64; -1 where nothing is held."""
        assert self.step is not None
        if group not in self._slots:
            tables = self.step.groups[group]
            n = self.cache.plan.groups[group].tokens_per_block
            position = torch.arange(self._columns) - (self._columns - tables.seq_lens.long())[:, None]  # [S, columns]
            block = tables.block_table.long().gather(1, position.clamp(min=0) // n)
            held = torch.where((position >= 0) & (block >= 0), block * n + position % n, -1)
            slots = held.new_full((len(self._members), self._columns), -1)
            slots[[b for b, row in enumerate(self._members) if row is not None]] = held
            self._slots[group] = slots.flatten()
        return self._slots[group]

    # --- rows as a whole ------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns of every row."""
        if tokens_to_remove > 0:
            raise LayoutError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        self.abort()
        gone = min(-tokens_to_remove, self._num_drafts)
        self._keep(self._num_drafts - gone)
        self.rows.forget(gone)
        if -tokens_to_remove > gone:
            self.rows.crop(-tokens_to_remove - gone)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row `i` what row `beam_idx[i]` was; rows named twice share their blocks."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies next to each other."""
        self._select([b for b in range(len(self.rows.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order (or those a mask `[B]` of bool shows)."""
        chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def _select(self, sources: list[int]) -> None:
        self.abort()
        self._keep()
        self.rows.select(sources)

    def reset(self) -> None:
        """Release every row. What was computed stays known to later prompts until its blocks are needed."""
        self.abort()
        self._keep()
        self.rows.release()

    def close(self) -> None:
        """Release every row and leave the model as it was."""
        self.reset()
        self.bridge.leave(self)

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def plan_for(
    model: PreTrainedModel,
    budget: int | str | None,
    codec: str | Mapping[str, object] | None,
    layout: str,
    tokens_per_block: int,
    options: Mapping[str, Any],
) -> Plan:
    """Plan a cache for a model, in its own dtype unless a codec is named."""
    spec = CacheSpec.from_config(model.config)
    limits: dict[str, Any] = (
        {"max_step_tokens": 8192} if budget is None else {"max_step_tokens": 8192, "budget": budget}
    )
    states = {kind.name for layer in spec.layers for kind in layer.kinds if isinstance(kind, StateKind)}
    if states == {CONV}:
        limits["num_draft"] = DRAFT_STATES
    if any(needs_single_steps(layer) for layer in spec.layers):
        limits["checkpoint_interval"] = spec.max_seq_len  # a prefill is not cut but before its last block
    return make_plan(
        spec,
        codec=dtype(str(model.dtype)).name if codec is None else codec,
        layout=layout,
        tokens_per_block=tokens_per_block,
        **{**limits, **options},
    )
