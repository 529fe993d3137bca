"""kvpool: the KV cache of LLM inference as a library.

The public face. Names are imported on first use, so that planning and address arithmetic never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.cache import KVCache as KVCache
    from kvpool.codecs import Codec as Codec
    from kvpool.codecs import register as register
    from kvpool.errors import KVError as KVError
    from kvpool.errors import LayoutError as LayoutError
    from kvpool.errors import OutOfBlocks as OutOfBlocks
    from kvpool.errors import PlanError as PlanError
    from kvpool.errors import PlanMismatch as PlanMismatch
    from kvpool.errors import SpecError as SpecError
    from kvpool.errors import TierError as TierError
    from kvpool.errors import UnsupportedError as UnsupportedError
    from kvpool.ledger import Ledger as Ledger
    from kvpool.ledger import Media as Media
    from kvpool.ledger import Retention as Retention
    from kvpool.plan import Plan as Plan
    from kvpool.plan import make_plan as make_plan
    from kvpool.pools import Pools as Pools
    from kvpool.sequence import Sequence as Sequence
    from kvpool.spec import CacheSpec as CacheSpec
    from kvpool.step import Step as Step

__version__ = "0.1.0"

#: Public name -> module that defines it.
_HOMES = {
    "CacheSpec": "kvpool.spec",
    "Codec": "kvpool.codecs",
    "KVCache": "kvpool.cache",
    "KVError": "kvpool.errors",
    "LayoutError": "kvpool.errors",
    "Ledger": "kvpool.ledger",
    "Media": "kvpool.ledger",
    "OutOfBlocks": "kvpool.errors",
    "Plan": "kvpool.plan",
    "PlanError": "kvpool.errors",
    "PlanMismatch": "kvpool.errors",
    "Pools": "kvpool.pools",
    "Retention": "kvpool.ledger",
    "Sequence": "kvpool.sequence",
    "SpecError": "kvpool.errors",
    "Step": "kvpool.step",
    "TierError": "kvpool.errors",
    "UnsupportedError": "kvpool.errors",
    "make_plan": "kvpool.plan",
    "register": "kvpool.codecs",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}; public names: {', '.join(_HOMES)}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
