"""The layer objects transformers' models call. They hold nothing between forwards: their cache does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvpool.errors import SpecError
from kvpool.kinds import KVKind, LatentKind, LayerSpec, StateKind

if TYPE_CHECKING:
    from kvpool.transformers.steps import StepCache

#: What stands for a layer that stores nothing: before transformers 5.23, a layer that is never given anything.
_NOTHING: Any = getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer)
#: A convolution's state lacks the oldest of the columns that transformers keeps: the next token pushes it out unread.
CONV = "conv"


def needs_single_steps(spec: LayerSpec) -> bool:
    """Whether transformers can continue a layer's state by one token a forward only.

    Its selective scan of Mamba 1 (one decay a channel: a state of two axes) takes no state to begin with; the form for
    a single token does.
    """
    return any(isinstance(kind, StateKind) and kind.name != CONV and len(kind.shape) == 2 for kind in spec.kinds)


class Owned:
    """A layer of a cache, which it does not keep alive.

    Args:
        owner: The cache it belongs to.
        layer: Its index in the model.
    """

    def __init__(self, owner: StepCache, layer: int) -> None:
        self._owner = weakref.ref(owner)
        self.layer = layer

    @property
    def owner(self) -> StepCache:
        """The cache this layer belongs to."""
        owner = self._owner()
        assert owner is not None
        return owner


class AttentionLayer(Owned, CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer: keys and values, or a latent, with indexer keys or without."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: StepCache, layer: int) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        Owned.__init__(self, owner, layer)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `k, v [B, H, n, D]` (for MLA: latent and rope part) of the step's rows."""
        return self.owner.store(self.layer, key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store indexer keys `[B, n, Di]` of the step's rows; return those of all columns."""
        return self.owner.store_index(self.layer, indexer_key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.get_seq_length()

    def get_max_length(self) -> int:
        return -1


class StateLayer(Owned, LinearAttentionLayer):
    """One recurrent layer. During a forward it holds working copies of the states of the step's sequences.

    A working copy may be changed in place: what counts is what it is when the forward ends.

    Args:
        owner: The cache it belongs to.
        layer: Its index in the model.
        kinds: The states it keeps.
    """

    is_compileable = False

    def __init__(self, owner: StepCache, layer: int, kinds: tuple[StateKind, ...]) -> None:
        LinearAttentionLayer.__init__(self)
        Owned.__init__(self, owner, layer)
        self.kinds = kinds
        self.record_past = False  # transformers' name: its models then leave all columns of a forward
        #: Drafts at the end of every row of the running forward; the states after each are kept.
        self.num_drafts = 0

    @property
    def is_croppable(self) -> bool:
        """Whether the states before the last forward's drafts are kept."""
        return bool(self.record_past)

    def load(self, dtype: torch.dtype) -> None:
        """Take the states the step's sequences start from; nothing when no sequence has one yet."""
        step = self.owner.step
        assert step is not None
        self.clear()
        for kind in self.kinds:
            group = self.owner.cache.plan.find(self.layer, kind.name)[0]
            if not (step.buffers.arrays.groups[group].read_slots[: step.num_sequences] >= 0).any():
                continue
            state = self.owner.cache.state_read(self.layer, step, kind.name)
            if kind.name == CONV:
                state = torch.nn.functional.pad(state.to(dtype), (1, 0))
                self.conv_kernel_size[0] = state.shape[-1]
                self.conv_states[0], self.is_conv_states_initialized[0] = state, True
            else:
                self.recurrent_states[0], self.is_recurrent_states_initialized[0] = state, True
            self.has_previous_state[0] = True

    def save(self) -> None:
        """Put the states the step's sequences end in into fresh slots.

        Raises:
            SpecError: The model's state has another shape than the plan's.
        """
        step = self.owner.step
        assert step is not None
        for kind in self.kinds:
            state = self.conv_states[0] if kind.name == CONV else self.recurrent_states[0]
            columns = state
            if columns is not None and kind.name == CONV:
                columns = torch.nn.functional.pad(columns, (kind.shape[-1], 0))  # a short first forward left few
                state = before(columns, self.num_drafts, kind.shape[-1])
            if state is None or columns is None:
                raise SpecError(
                    f"layer {self.layer} left no state {kind.name!r} in its cache: {type(self.owner.model).__name__}"
                    " keeps its recurrent states in its modules, not in its cache, where nothing can share them"
                )
            if tuple(state.shape[1:]) != kind.shape:
                raise SpecError(
                    f"state {kind.name!r} of layer {self.layer} is planned as {list(kind.shape)}, is"
                    f" {list(state.shape[1:])}"
                )
            self.owner.cache.state_write(self.layer, step, kind.name, state)
            for draft in range(self.num_drafts):  # only of convolutions
                state = before(columns, self.num_drafts - 1 - draft, kind.shape[-1])
                self.owner.cache.state_write(self.layer, step, kind.name, state, draft=draft)

    def clear(self) -> None:
        """Hold nothing."""
        self.conv_states[0] = self.recurrent_states[0] = None
        for flags in (self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state):
            flags[0] = False


def before(columns: torch.Tensor, last: int, width: int) -> torch.Tensor:
    """Return the convolution's state `[B, C, width]` before the last columns `[B, C, n]` it was given."""
    end = columns.shape[-1] - last
    return columns[..., end - width : end].contiguous()


class HybridLayer(StateLayer, AttentionLayer):  # type: ignore[no-untyped-call, override]
    """One layer with both attention and a recurrent state."""

    def __init__(self, owner: StepCache, layer: int, kinds: tuple[StateKind, ...]) -> None:
        AttentionLayer.__init__(self, owner, layer)
        StateLayer.__init__(self, owner, layer, kinds)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Set up working states; keys and values need nothing."""
        StateLayer.lazy_initialization(self, *args, **kwargs)


def make_layer(owner: StepCache, layer: int, spec: LayerSpec) -> CacheLayerMixin | StateLayer:
    """Return the layer object for what a layer stores; one that stores nothing is transformers' own."""
    attends = any(isinstance(kind, KVKind | LatentKind) for kind in spec.kinds)
    states = tuple(kind for kind in spec.kinds if isinstance(kind, StateKind))
    if attends:
        return HybridLayer(owner, layer, states) if states else AttentionLayer(owner, layer)
    if states:
        return StateLayer(owner, layer, states)
    nothing: CacheLayerMixin = _NOTHING()
    return nothing
