"""KVCache: ledger, pools and kernels wired together; nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpool import ops
from kvpool.backends import Attention, get_backend
from kvpool.errors import LayoutError, PlanError
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, Lifetime
from kvpool.ledger import Ledger, Media, Retention, Stats
from kvpool.plan import Plan
from kvpool.pools import Constants, Part, Pools
from kvpool.pools.calibration import calibrate
from kvpool.pools.constants import apply_scales, read_scales, set_layer, set_unit_scales
from kvpool.sequence import Sequence
from kvpool.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one layer, resolved once.

    Attributes:
        k: Parts that make up a key.
        v: Part that holds values; None for a layer without attention.
        v_dim: Elements of a value.
        index: Indexer keys, or None.
        lifetime: Which positions a row sees.
    """

    k: tuple[Part, ...]
    v: Part | None
    v_dim: int
    index: Part | None
    lifetime: Lifetime
    default_scale: float


class KVCache:
    """A paged cache for one model on one device.

    Args:
        plan: Every shape and size.
        device: `cpu`.
        backend: `auto`, or a name; a name never falls back.
        clock: Seconds, monotonic; for retention.
        touch: Fault all committed memory in now, so that no step does.
        scales: Decode scales for codecs that need constant ones; see `set_scales`.

    Invariants: no address, stride or capacity changes while the cache lives; one thread opens steps.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "cpu",
        backend: str = "auto",
        clock: Callable[[], float] | None = None,
        policy: str = "lru",
        touch: bool = False,
        scales: str | Path | Mapping[tuple[int, str], float] | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.backend = get_backend(backend, device)
        self.pools = Pools(plan, device, touch=touch)
        self.ledger = Ledger(plan, policy=policy) if clock is None else Ledger(plan, clock=clock, policy=policy)
        self._layers = tuple(self._resolve(layer) for layer in range(plan.spec.num_layers))
        self._buffers = (StepBuffers(plan), StepBuffers(plan))
        for buffers in self._buffers:
            self.backend.prepare(self.pools, buffers)
        self._turn = 0
        if scales is not None:
            self.set_scales(scales)

    def _resolve(self, layer: int) -> LayerParts:
        source = self.plan.source_layer(layer)
        spec = self.plan.spec.layers[source]
        k: tuple[Part, ...] = ()
        v, v_dim, index, lifetime = None, 0, None, FULL
        for kind in spec.kinds:
            if isinstance(kind, KVKind):
                k, v, v_dim = (self.pools.part(source, "k"),), self.pools.part(source, "v"), kind.v_head_dim
            elif isinstance(kind, LatentKind):
                latent = self.pools.part(source, "latent")
                whole = latent.vector.dim == kind.kv_lora_rank + kind.qk_rope_head_dim
                k = (latent,) if whole else (latent, self.pools.part(source, "rope"))
                v, v_dim = latent, kind.kv_lora_rank
            elif isinstance(kind, IndexerKind):
                index = self.pools.part(source, "index")
        if v is not None:
            lifetime = self.plan.groups[v.group].lifetime or FULL
        dim = sum(part.vector.dim for part in k)
        return LayerParts(k, v, v_dim, index, lifetime, dim**-0.5 if dim else 1.0)

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
        handle = self.ledger.open(
            tokens,
            salt=salt,
            lora_id=lora_id,
            media=media,
            retention=retention,
            max_cached_tokens=max_cached_tokens,
        )
        return Sequence(self.ledger, handle)

    def step(self, items: SequenceOf[tuple[Sequence, int]], *, commit: bool = True) -> Step:
        """Open a step: match, allocate all or nothing, copy what is written while shared, fill the tensors.

        Args:
            items: `(sequence, most tokens to compute)`, served in this order.
            commit: Make filled blocks matchable when the step ends.

        Raises:
            OutOfBlocks: Not all sequences fit; nothing has changed.
        """
        buffers = self._buffers[self._turn]
        decision = self.ledger.begin_step([(seq.id, most) for seq, most in items], buffers.arrays, commit=commit)
        self._turn ^= 1
        for group, copies in decision.copies_by_group():
            self.backend.copy(self.pools, group, copies)
        step = Step(buffers, decision, self._close)
        self.backend.begin(step)
        return step

    def fits(self, items: SequenceOf[tuple[Sequence, int]]) -> int:
        """Return how many leading items a step would take now; changes nothing.

        Args:
            items: As for `step`.
        """
        return self.ledger.fits([(seq.id, most) for seq, most in items])

    def _close(self, step: Step, failed: bool) -> None:
        if failed:
            self.ledger.abort_step(step.decision)
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
            parts.default_scale if scale is None else scale, parts.lifetime, softcap or 0.0, sinks, indices
        )
        result, lse = ops.attend(self.backend, q, parts.k, parts.v, parts.v_dim, step, options, out, return_lse)
        return result if lse is None else (result, lse)

    def read(self, layer: int, sequence: Sequence) -> tuple[torch.Tensor, ...]:
        """Return what a layer holds of a sequence, decoded: `(k, v)` or `(latent, rope)`, fp32 `[tokens, H, D]`."""
        parts = self._layers[layer]
        if parts.v is None:
            raise PlanError(f"layer {layer} stores no keys")
        table, length = self.ledger.table(sequence.id, parts.v.group)
        n = parts.v.tokens_per_block
        token = torch.arange(length)
        block = torch.tensor(table, dtype=torch.int64)[token // n]
        slots = torch.where(block >= 0, block * n + token % n, -1)
        out = []
        for part in dict.fromkeys((*parts.k, parts.v)):
            tensor = torch.empty((length, part.num_heads, part.vector.dim))
            self.backend.read(part, slots, tensor)
            out.append(tensor)
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
            batch: By layer: `k` and `v`, or `latent` (with `rope` after it on the last axis when both have one codec),
                each `[T, H, D]`.
            smoothing: Measure smoothing of the keys, too.
            rotation: Set rotation of the quantised parts before the scales are measured.

        Raises:
            PlanError: A sample is empty or not finite, a layer stores no such part, or the constants are frozen.
        """
        for layer, tensors in batch.items():
            constants = self._constants(layer)
            for part, x in tensors.items():
                if part not in constants:
                    raise PlanError(f"layer {layer} stores no {part!r}; it stores {', '.join(sorted(constants))}")
                quantised = constants[part].quantised
                calibrate(
                    constants[part],
                    x,
                    smoothing=smoothing and quantised and part in ("k", "latent", "rope"),
                    rotation=rotation if quantised else None,
                )

    def _constants(self, layer: int) -> dict[str, Constants]:
        source = self.plan.source_layer(layer)
        return {part: constants for (at, part), constants in self.pools.constants.items() if at == source}

    # --- whole cache ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the counters of the ledger (a frozen dataclass)."""
        return self.ledger.stats()

    def check(self) -> None:
        """Verify every invariant of the ledger; raises `KVError` naming the first that fails."""
        self.ledger.check()
