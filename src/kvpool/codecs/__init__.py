"""The table of stored formats. One file a format; nothing outside a codec's own file asks for its name."""

from __future__ import annotations

from kvpool.codecs.base import Codec, PlaneSpec, Vector
from kvpool.codecs.plain import PLAIN
from kvpool.errors import PlanError

__all__ = ["CODECS", "Codec", "PlaneSpec", "Vector", "get_codec", "register"]

#: Every codec by name. Changed only by `register`.
CODECS: dict[str, Codec] = {}


def register(codec: Codec) -> Codec:
    """Add a codec to the table, from inside or outside the package, and return it.

    Raises:
        PlanError: Another codec has this name.
    """
    if CODECS.get(codec.name, codec) is not codec:
        raise PlanError(f"codec {codec.name!r} is registered already; choose another name")
    CODECS[codec.name] = codec
    return codec


def get_codec(name: str) -> Codec:
    """Return the codec called `name`.

    Raises:
        PlanError: The name is unknown.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise PlanError(f"unknown codec {name!r}; known: {', '.join(CODECS)}") from None


for _codec in PLAIN:
    register(_codec)
