"""What a model must be told so that its forward runs on a kvpool cache, and how that is undone.

A forward that is given a `HostedCache` runs between two hooks: the first makes kvpool's attention the model's, the
second gives it its own back. Forwards with any other cache never notice. `generate` is met where it prepares its
inputs: there the full ids and the mask are at hand, and the part to compute can be chosen.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpool.errors import UnsupportedError
from kvpool.transformers.attention import ATTENTION_NAME, BRIDGE, register_attention
from kvpool.transformers.sparse import is_indexer, pick

_PREPARE = "prepare_inputs_for_generation"


class HostedCache(ABC):
    """What a bridge asks of a cache.

    Attributes:
        gathers: True when the model keeps its own attention and is handed dense keys and values.
        needs_mask: False when no layer of a forward that `generate` runs has padding to leave out.
    """

    gathers: bool
    needs_mask: bool

    @abstractmethod
    def prepare(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        """Open a step for what `generate` is about to compute; return how many last columns that is."""

    @abstractmethod
    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make sure that a step is open."""

    @abstractmethod
    def after_forward(self, failed: bool) -> None:
        """End the step of this forward."""

    @abstractmethod
    def score(self, layer: int, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int) -> torch.Tensor:
        """Store indexer keys and return the slots every row may see."""

    @abstractmethod
    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        window: int | None,
        indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with `query [B, Q, n, D]` of the calling module; return `[B, n, Q, Dv]`."""

    @abstractmethod
    def abort(self) -> None:
        """Undo a step that is still open."""


#: What models call their cache: all since transformers 5.24; most before; those with nothing but states before.
_NAMES = ("cache", "past_key_values", "cache_params")


def cache_of(kwargs: dict[str, Any]) -> object:
    """Return the cache among the arguments of a forward, by any of its names."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)


def cache_argument(model: PreTrainedModel | type[PreTrainedModel]) -> str:
    """Return what a model calls its cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in _NAMES if name in parameters)


class Bridge:
    """One a model: hooks, attention implementation and the wrapped `prepare_inputs_for_generation`.

    Args:
        model: A causal language model of transformers.

    Attributes:
        active: The cache whose forward is running.
        can_attend: Whether the model calls attention functions by name, so that kernels can take their place.
        users: The caches that were made for this model and live.

    Invariants: `active` is None, and the model's own attention set, whenever no forward runs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.active: HostedCache | None = None
        self.can_attend = bool(model._can_set_attn_implementation())
        self.users: weakref.WeakSet[HostedCache] = weakref.WeakSet()
        self._model = weakref.ref(model)
        configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
        self._configs = tuple(configs.values())
        self._saved: list[str | None] = []
        self._stand_ins: tuple[tuple[torch.nn.Module, str, Any], ...] = (
            *((m, "expand_kv", _keep_latents) for m in model.modules() if hasattr(m, "expand_kv")),
            *((m, "forward", functools.partial(pick, self, m)) for m in model.modules() if is_indexer(m)),
        )
        self._previous = model.__dict__.get(_PREPARE)
        model.__dict__[_PREPARE] = self._wrapper(inspect.signature(getattr(model, _PREPARE)))
        self._handles = (
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        )
        self._modules = tuple(m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int))
        for module in (model, *self._modules):
            module.__dict__[BRIDGE] = self
        register_attention()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Bridge:
        """Return the bridge of a model, built on first use."""
        bridge = model.__dict__.get(BRIDGE)
        return bridge if isinstance(bridge, Bridge) else cls(model)

    def leave(self, cache: HostedCache) -> None:
        """Forget a cache; without any, leave the model as it was before the bridge."""
        self.users.discard(cache)
        model = self._model()
        if self.users or model is None or model.__dict__.get(BRIDGE) is not self:
            return
        for handle in self._handles:
            handle.remove()
        for module in (model, *self._modules):
            module.__dict__.pop(BRIDGE, None)
        model.__dict__.pop(_PREPARE, None)
        if self._previous is not None:
            model.__dict__[_PREPARE] = self._previous

    def _wrapper(self, signature: inspect.Signature) -> Any:
        previous, reference = self._previous, self._model

        def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
            model = reference()
            original = functools.partial(getattr(type(model), _PREPARE), model) if previous is None else previous
            cache = cache_of(kwargs)
            if not isinstance(cache, HostedCache):
                inputs: dict[str, Any] = original(*args, **kwargs)
                return inputs
            if kwargs.get("inputs_embeds") is not None:
                raise UnsupportedError("PagedCache finds prefixes by token ids; inputs_embeds has none: pass input_ids")
            ids = args[0] if args else kwargs["input_ids"]
            kwargs["next_sequence_length"] = cache.prepare(ids, kwargs.get("attention_mask"))
            without_mask = not cache.needs_mask
            inputs = original(*args, **kwargs)
            if cache_of(inputs) is not cache:
                cache.abort()
                raise UnsupportedError(
                    f"{type(model).__name__} throws its cache away at this length (it changes its rotary embedding);"
                    " keep prompt and answer on one side of config.original_max_position_embeddings"
                )
            if without_mask:
                inputs["attention_mask"] = None
            return inputs

        prepare.__signature__ = signature  # type: ignore[attr-defined]  # generate reads the names of the arguments
        return prepare

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active is not None:  # an interrupt left the last forward without its second hook
            self._leave(module, (), {"cache": self.active}, None)
        cache = cache_of(kwargs)
        if not isinstance(cache, HostedCache):
            return
        cache.before_forward(args, kwargs)
        self.active = cache
        if not cache.gathers:
            self._saved = [config._attn_implementation for config in self._configs]
            for config in self._configs:
                config._attn_implementation_internal = ATTENTION_NAME
            for owner, name, function in self._stand_ins:
                owner.__dict__[name] = function

    def _leave(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        cache = self.active
        if cache is None or cache_of(kwargs) is not cache:
            return
        self.active = None
        for config, name in zip(self._configs, self._saved, strict=bool(self._saved)):
            config._attn_implementation_internal = name
        self._saved = []
        for owner, method, _ in self._stand_ins:
            owner.__dict__.pop(method, None)
        cache.after_forward(failed=output is None)


def _keep_latents(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for `expand_kv`: attention reads the latents as they are stored."""
    return latent, rope
