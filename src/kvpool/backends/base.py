"""What a backend does: write, attend, score, gather, copy and convert on one device. Knows no ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kvpool.codecs import Counts
from kvpool.kinds import FULL, Lifetime
from kvpool.pools import Part, Pools
from kvpool.step import Step, StepBuffers


class Attention(NamedTuple):
    """The options of one attention call; a tuple, which is made in a third of a frozen dataclass's time.

    Attributes:
        scale: Factor on `q . k`.
        lifetime: Which positions a row sees: all before it, a window, or its chunk.
        softcap: `c` of `c * tanh(x / c)` on scaled logits; 0 for none.
        sinks: `[Q]` fp32, an extra logit in the denominator only.
        indices: `[T, K]` int64 slots a row may see, -1 invalid; None for all.
        tree: `[T, W]` int64 bit masks: bit `i` of a row says whether it sees draft row `i` of its sequence.
    """

    scale: float
    lifetime: Lifetime = FULL
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    tree: torch.Tensor | None = None


class Backend(Protocol):
    """Carries out operations on parts. Arguments were checked by `kvpool.ops`.

    Attributes:
        name: As in the table of backends.
        replayable: Calls for a padded step read addresses that do not change, and `begin` renews all they depend on: a
            captured CUDA graph of them serves every step of that size.
    """

    name: str
    replayable: bool

    def prepare(self, pools: Pools, buffers: StepBuffers) -> None:
        """Learn the addresses of a step's buffers; called once for each."""

    def begin(self, step: Step) -> None:
        """Partition the attention work of a step; called once a step, before any other call for it."""

    def write(self, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step) -> None:
        """Encode `[T, H, D]` for each part into the step's slots; a slot of -1 writes nothing."""

    def attend(
        self,
        q: torch.Tensor,
        k: tuple[Part, ...],
        v: Part,
        v_dim: int,
        step: Step,
        options: Attention,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attend with `q [T, Q, D]` to the sequences of the step; write `out [T, Q, v_dim]`, `lse [T, Q]`.

        The parts of `k` stand one after another on the last axis; `v` may be one of them, read up to `v_dim`.
        """

    def score(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        part: Part,
        step: Step,
        lifetime: Lifetime,
        indices: torch.Tensor,
    ) -> None:
        """Pick the tokens that matter most to every row, by the sum over heads of `w * relu(q . k)`.

        Args:
            q: `[T, Hi, Di]` indexer queries.
            weights: `[T, Hi]` fp32.
            part: The indexer keys.
            lifetime: Which positions a row sees.
            indices: `[T, K]` int64, filled with the slots of the K best, best first; -1 where a row sees fewer.
        """

    def read(self, part: Part, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Decode the tokens at `slots [n]` int64 into `out [n, H, D]`; a slot of -1 gives zeros."""

    def read_states(self, part: Part, slots: torch.Tensor) -> torch.Tensor:
        """Decode the recurrent states in `slots [S]` int32 to fp32 `[S, D]`; a slot of -1 gives zeros."""

    def write_states(self, part: Part, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Encode `states [S, D]`, of any float type, into `slots [S]` int32; a slot of -1 writes nothing."""

    def convert(self, source: Part, source_slots: torch.Tensor, part: Part, slots: torch.Tensor) -> None:
        """Store the vectors at `source_slots [n]` of one part at `slots [n]` of another of any codec and layout."""

    def copy(self, pools: Pools, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks `(source, destination)` of a group, all planes and layers."""

    def move(self, pools: Pools, group: int, slots: Sequence[tuple[int, int]]) -> None:
        """Copy tokens `(source slot, destination slot)` of a group one after another, all planes and layers."""

    def counts(self, part: Part) -> Counts:
        """Return what the part's constant scale lost so far."""

    def forget(self) -> None:
        """Drop what was derived from constants, after they were thawed."""
