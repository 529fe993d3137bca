"""What a model reads and writes of a cache at one layer. Knows no ledger: a step and slots say where."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvpool import ops
from kvpool.backends import Attention
from kvpool.errors import LayoutError, PlanError, UnsupportedError
from kvpool.kinds import StateKind
from kvpool.layer_constants import LayerConstants
from kvpool.plan import Plan
from kvpool.pools import LayerParts, Part, View
from kvpool.step import Step, StepBuffers


class LayerAccess(LayerConstants):
    """The layers of a plan's pools: write, attend, score, states, and what is stored, decoded or as it is.

    Args:
        plan: Every shape and size.
        device: Where the pools are.
        backend: `auto`, or a name; a name never falls back.
        num_threads: Of its kernels; None leaves it to the backend.
        touch: Fault all committed memory in now, so that no step does.
    """

    def __init__(self, plan: Plan, device: str, backend: str, *, num_threads: int | None, touch: bool) -> None:
        super().__init__(plan, device, backend, num_threads=num_threads, touch=touch)
        self._layers = tuple(LayerParts.of(self.pools, layer) for layer in range(plan.spec.num_layers))
        first = StepBuffers(plan, device)
        self._buffers = (first, StepBuffers(plan, device, share=first))
        for buffers in self._buffers:
            self.backend.prepare(self.pools, buffers)

    def _at(self, layer: int, step: Step | None = None) -> LayerParts:
        """Return the parts of a layer.

        Raises:
            LayoutError: There is no such layer, or the step is another cache's: its slots mean nothing here.
        """
        if layer not in range(len(self._layers)):
            raise LayoutError(f"layer must be one of 0..{len(self._layers) - 1}, got {layer!r}")
        if step is not None and step.buffers not in self._buffers:
            raise LayoutError("this step was opened by another cache; use the one whose step() returned it")
        return self._layers[layer]

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
        parts = self._at(layer, step)
        stored: tuple[Part, ...] = ()
        tensors: tuple[torch.Tensor, ...] = ()
        if k is not None and v is not None and parts.v is not None:
            stored, tensors = (*parts.k, parts.v), (k, v)
        elif latent is not None and rope is not None and parts.k:
            stored = parts.k
            tensors = (latent, rope) if len(parts.k) == 2 else (torch.cat([latent, rope], -1),)
        elif index is None or any(x is not None for x in (k, v, latent, rope)):
            raise LayoutError(
                f"layer {layer} stores {self.plan.spec.layers[layer].kinds}; give k and v, or latent and rope"
            )
        if index is not None:
            if parts.index is None:
                raise LayoutError(f"layer {layer} stores no indexer keys")
            stored, tensors = (*stored, parts.index), (*tensors, index)
        ops.write(self.backend, stored, tensors, step)

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
        parts = self._at(layer, step)
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
        parts = self._at(layer, step)
        if parts.index is None:
            raise LayoutError(f"layer {layer} stores no indexer keys")
        return ops.score(self.backend, q, weights, parts.index, step, parts.lifetime, topk)

    def state_read(self, layer: int, step: Step, name: str) -> torch.Tensor:
        """Return the recurrent states the step's sequences start from: `[S, *shape]`, zeros for a new sequence.

        Args:
            layer: Model layer.
            step: An open step.
            name: `conv`, `ssm`, or another name of the layer's states.
        """
        part, shape = self._state(layer, step, name)
        return ops.state_read(self.backend, part, shape, step.groups[part.group].read_slots)

    def state_write(self, layer: int, step: Step, name: str, states: torch.Tensor, *, draft: int | None = None) -> None:
        """Store the states the step's sequences end in, in fresh slots: a failed step changes none.

        Args:
            layer: Model layer.
            step: An open step.
            name: Of the layer's states.
            states: `[S, *shape]`.
            draft: These are the states after this draft of every sequence, of which `accept` keeps one; None: those
                before all drafts.
        """
        part, shape = self._state(layer, step, name)
        tables = step.groups[part.group]
        if draft is not None and draft not in range(tables.draft_slots.shape[1]):
            raise LayoutError(f"draft must be one of 0..{tables.draft_slots.shape[1] - 1} (num_draft), got {draft}")
        slots = tables.write_slots if draft is None else tables.draft_slots[:, draft].contiguous()
        ops.state_write(self.backend, part, shape, slots, states)

    def state(self, layer: int, step: Step, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(read view, read slots, write view, write slots)` of a state in a plain format.

        The views are `[B, *shape]` on the pool itself; the slots `[S]` int32, -1 for a sequence that has none yet.

        Raises:
            UnsupportedError: The state's codec is not plain; use `state_read` and `state_write`.
        """
        part, shape = self._state(layer, step, name)
        if len(part.planes) > 1 or part.codec.quantised:
            raise UnsupportedError(f"state {name!r} is stored as {part.codec.name}; use state_read and state_write")
        view = part.planes["data"].tensor[:, 0, 0].view(-1, *shape)
        tables = step.groups[part.group]
        return view, tables.read_slots, view, tables.write_slots

    def _state(self, layer: int, step: Step, name: str) -> tuple[Part, tuple[int, ...]]:
        self._at(layer, step)
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
        parts = self._at(layer, step)
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
        parts = self._at(layer)
        if parts.v is None:
            raise PlanError(f"layer {layer} stores no keys")
        out = self._read((*parts.k, parts.v), slots, dtype)
        return out if len(out) == 2 else (out[0][..., : parts.v_dim], out[0][..., parts.v_dim :])

    def take_index(self, layer: int, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the indexer keys at slots `[n]` int64, decoded, `[n, 1, Di]`; zeros for -1."""
        part = self._at(layer).index
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

    def _read(
        self, parts: Iterable[Part], slots: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, ...]:
        """Decode the tokens at `slots` of each part once, in order."""
        return tuple(ops.read(self.backend, part, slots, dtype) for part in dict.fromkeys(parts))
