"""The table of stored formats. One file a format; nothing outside a codec's own file asks for its name."""

from __future__ import annotations

from kvpool.codecs.base import Codec, Counts, PlaneSpec, Vector
from kvpool.codecs.fp8 import FP8
from kvpool.codecs.fp8_tensor import FP8_TENSOR
from kvpool.codecs.index_fp4 import INDEX_FP4
from kvpool.codecs.index_fp8 import INDEX_FP8
from kvpool.codecs.int8 import INT8
from kvpool.codecs.int8_tensor import INT8_TENSOR
from kvpool.codecs.nvfp4 import NVFP4
from kvpool.codecs.nvfp4_token import NVFP4_TOKEN
from kvpool.codecs.plain import PLAIN
from kvpool.errors import PlanError

__all__ = ["CODECS", "Codec", "Counts", "PlaneSpec", "Vector", "get_codec", "register"]

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


for _codec in (*PLAIN, FP8, *FP8_TENSOR, INT8, INT8_TENSOR, NVFP4, NVFP4_TOKEN, INDEX_FP8, INDEX_FP4):
    register(_codec)
