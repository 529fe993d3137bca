"""Models that take only a cache of a class of their own. Knows what such a class is asked for, and nothing of pages."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class LightningStates:
    """What the layers of lightning attention (MiniMax) ask of their cache instead of of its layers."""

    layers: list[Any]

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state `[B, heads, D, D]` a layer starts from; None when no row has one."""
        state: torch.Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Take the state a layer ends in."""
        self.layers[layer_idx].recurrent_states[0] = linear_cache

    def __len__(self) -> int:
        return len(self.layers)


def demanded_class(model: PreTrainedModel) -> type[Cache] | None:
    """Return the class with lightning states that a model's forward names as the type of its cache, if any."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        parameters = inspect.signature(module.forward).parameters
        parameter = parameters.get("cache") or parameters.get("past_key_values")  # its name before transformers 5.24
        if parameter is None:
            continue
        for named in (parameter.annotation, *typing.get_args(parameter.annotation)):
            if inspect.isclass(named) and issubclass(named, Cache) and hasattr(named, "set_linear_cache"):
                return named
    return None


@functools.cache
def adapted(cls: type, demanded: type[Cache]) -> type:
    """Return a subclass of both: instances pass the model's check of their class, and behave as `cls` does."""
    return type(cls.__name__, (LightningStates, cls, demanded), {"__module__": cls.__module__, "__doc__": cls.__doc__})
