"""transformers' own cache, with every stored vector taken through a codec: what a format costs without kvpool's paging.

Attention is the model's own; of kvpool only the codec's reference arithmetic is used.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpool.kinds import LatentKind, StateKind
from kvpool.pools import Part
from kvpool.transformers import PagedCache
from kvpool.transformers.demanded import demanded_class
from kvpool.transformers.layers import needs_single_steps


def through(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Return what a part would give back for `x [..., H, D]`."""
    c = part.constants
    planes = part.codec.encode(c.maps.store(x), part.vector, c.scale)
    return c.maps.restore(part.codec.decode(planes, part.vector, c.scale)).to(x.dtype)


def lossy_cache(pages: PagedCache, model: PreTrainedModel) -> Any:
    """Make transformers' cache for a model, its vectors stored as `pages` would store them."""
    kv = pages.cache
    spec, part = kv.plan.spec, kv.pools.part
    base: type = demanded_class(model) or DynamicCache

    class LossyCache(base):  # type: ignore[misc]
        def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(kind, LatentKind) for kind in spec.layers[layer].kinds):
                k, v = latents(layer, k, v)
            else:
                k, v = (
                    through(part(layer, name), x.transpose(1, 2)).transpose(1, 2) for name, x in (("k", k), ("v", v))
                )
            return super().update(k, v, layer, *args, **kwargs)

        def update_indexer(self, k: torch.Tensor, layer: int) -> torch.Tensor:
            found: torch.Tensor = super().update_indexer(through(part(layer, "index"), k[:, :, None])[:, :, 0], layer)
            return found

        def store_states(self) -> None:
            """Take the states through their codec, as they are between two forwards."""
            for layer, one in enumerate(spec.layers):
                for kind in one.kinds:
                    if isinstance(kind, StateKind) and kind.name != "conv":
                        own = getattr(self, "linear_cache", None)  # MiniMax keeps them beside its layers
                        state = own[layer] if own else self.layers[layer].recurrent_states[0]
                        state.copy_(through(part(layer, kind.name), state.flatten(1)).view_as(state))

    def latents(layer: int, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = latent.transpose(1, 2), rope.transpose(1, 2)
        if "rope" in kv._constants(layer):
            latent, rope = through(part(layer, "latent"), latent), through(part(layer, "rope"), rope)
        else:
            both = through(part(layer, "latent"), torch.cat([latent, rope], -1))
            latent, rope = both[..., : latent.shape[-1]], both[..., latent.shape[-1] :]
        return latent.transpose(1, 2), rope.transpose(1, 2)

    return LossyCache() if base is not DynamicCache else LossyCache(config=model.config)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model can be told positions; some caches cannot tell how long they are."""
    return "position_ids" in inspect.signature(model.forward).parameters


@torch.inference_mode()
def lossy_logits(pages: PagedCache, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits behind one prompt: forwards up to its last token, and one of that token.

    A state is stored where a forward of kvpool's ends: at the last border of a block before the last token of what is
    prefilled, there, and behind every token for models that cannot continue otherwise. Behind the border this runs
    token by token: not all models continue by several tokens on transformers' own cache.
    """
    cache, plan = lossy_cache(pages, model), pages.cache.plan
    last = len(ids) - 1
    borders, stores = [0, last, last + 1], {last}
    if any(isinstance(kind, StateKind) for layer in plan.spec.layers for kind in layer.kinds):
        border = (last - 1) // plan.tokens_per_block * plan.tokens_per_block
        borders = sorted({0, *range(border or last, last), last, last + 1})
        single = any(needs_single_steps(layer) for layer in plan.spec.layers)
        stores = set(borders) if single else {border, last}
    for begin, end in pairwise(borders):
        positions = {"position_ids": torch.arange(begin, end)[None]} if takes_positions(model) else {}
        given = {pages._argument: cache, **positions}
        logits: torch.Tensor = model(ids[None, begin:end], **given).logits[0, -1]
        if end in stores:
            cache.store_states()
    return logits
