"""What besides tokens makes a block's content: salt, adapter, media, each as bytes that cannot meet another's."""

from __future__ import annotations

import struct
from dataclasses import dataclass

Extra = str | bytes | int | None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, sound or video inside the prompt; its placeholder tokens do not say which one.

    Attributes:
        start: First token of the item.
        num_tokens: Tokens it covers.
        key: Names its content; opaque, compared in full. The caller derives it (content, size, preprocessing).
    """

    start: int
    num_tokens: int
    key: str | bytes | int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens <= 0:
            raise ValueError(f"Media needs start >= 0 and num_tokens > 0, got {self.start} and {self.num_tokens}")


def encode(value: Extra) -> bytes:
    """Encode a value so that values of different type or content never agree; None is empty."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, str):
        return b"s" + value.encode("utf-8")
    if type(value) is int:
        return b"i" + str(value).encode("ascii")
    raise TypeError(f"salt, lora_id and media keys are str, bytes or int, got {type(value).__name__}")


def media_of(extras: bytes, start: int) -> tuple[Media, ...]:
    """Return the items that the core's extras of a block name, their keys encoded.

    Args:
        extras: For each item `M`, where the block begins in it, its tokens, its key's length (int64 LE), its key.
        start: First token of the block.
    """
    items = []
    while extras:
        offset, num_tokens, size = struct.unpack_from("<qqq", extras, 1)
        items.append(Media(start - offset, num_tokens, extras[25 : 25 + size]))
        extras = extras[25 + size :]
    return tuple(items)
