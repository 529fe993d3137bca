"""What several commands read from the command line: models, codecs, lists, sizes. Knows no command."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.errors import PlanError
from kvpool.spec import CacheSpec, load_config

#: The embedded model's own configuration: what a command describes when it is given none.
EMBEDDED = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


HostSize = Annotated[str | None, typer.Option(help="Host memory for evicted blocks, such as 4GiB")]
HostCodec = Annotated[
    str | None, typer.Option(help="Format of blocks in host memory and on disk; default: the cache's own")
]
Disk = Annotated[Path | None, typer.Option(help="Directory for prefixes that outlive the process")]
DiskSize = Annotated[str | None, typer.Option(help="The most the directory may take")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch and of the kernels; default: all CPUs")]


class LayoutName(StrEnum):
    """Layouts a pool can have."""

    HND = "HND"
    NHD = "NHD"


def read_config(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration at `path` and its quantisation settings, or the embedded model's."""
    return (dict(EMBEDDED), {}) if path is None else load_config(path)


def read_spec(path: Path | None) -> CacheSpec:
    """Return the model at `path`, or the embedded one."""
    return CacheSpec.from_config(EMBEDDED if path is None else path)


def split(text: str, name: str) -> list[str]:
    """Return the parts of a comma-separated list.

    Raises:
        PlanError: It is empty.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise PlanError(f"{name} must be a comma-separated list, got {text!r}")
    return parts


def integer(text: str, name: str) -> int:
    """Return an integer, in digits and with an optional `k` or `Ki` (1,000 or 1,024).

    Raises:
        PlanError: It is none.
    """
    for suffix, factor in (("Ki", 1024), ("k", 1000), ("K", 1000)):
        if text.endswith(suffix):
            text, scale = text.removesuffix(suffix), factor
            break
    else:
        scale = 1
    try:
        return int(text.replace("_", "")) * scale
    except ValueError:
        raise PlanError(f"{name} must be an integer, got {text!r}") from None


def integers(text: str, name: str) -> list[int]:
    """Return a comma-separated list of integers."""
    return [integer(part, name) for part in split(text, name)]


def parse_codec(text: str | None) -> str | dict[str, Any] | None:
    """Return a codec choice: `fp8`, or parts such as `k=fp8,v=nvfp4,0=bf16,-1=bf16` (numbers are layers).

    Raises:
        PlanError: A part has no name.
    """
    if text is None or ("=" not in text and "," not in text):
        return text
    out: dict[str, Any] = {}
    layers: dict[int, str] = {}
    for part in split(text, "codec"):
        key, equals, name = part.partition("=")
        if not equals:
            key, name = "*", part
        if not name:
            raise PlanError(f"codec part {part!r} has no name; write it as part=codec, such as k=fp8")
        if key.lstrip("-").isdigit():
            layers[int(key)] = name
        else:
            out[key] = name
    return {**out, "layers": layers} if layers else out


def parse_shares(text: str | None) -> dict[str, float] | None:
    """Return shares by group: `full=0.8,window=0.2`.

    Raises:
        PlanError: A part is not a name and a number.
    """
    if text is None:
        return None
    out = {}
    for part in split(text, "shares"):
        name, _, value = part.partition("=")
        try:
            out[name] = float(value)
        except ValueError:
            raise PlanError(f"shares: {part!r} must be group=number, such as full=0.8") from None
    return out


def parse_layers(text: str | None) -> range | None:
    """Return the layers of a pipeline stage: `16:32`.

    Raises:
        PlanError: It is no range.
    """
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not colon:
        raise PlanError(f"layers must be a range such as 16:32, got {text!r}")
    return range(integer(start, "layers"), integer(stop, "layers"))


def parse_blocks(text: str | None) -> int | dict[str, int] | None:
    """Return numbers of blocks: `4096`, or by group `full=4096,window=512`.

    Raises:
        PlanError: A part is not a name and an integer.
    """
    if text is None or "=" not in text:
        return None if text is None else integer(text, "num_blocks")
    pairs = [part.partition("=") for part in split(text, "num_blocks")]
    return {name: integer(value, f"num_blocks[{name!r}]") for name, _, value in pairs}


def values_of(text: str, allowed: Sequence[str]) -> tuple[str, list[str]]:
    """Return what to compare: `codec=bf16,fp8` gives the name and its values.

    Raises:
        PlanError: The name is not one of `allowed`, or there are no values.
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in allowed:
        raise PlanError(f"compare must be NAME=value,value with NAME one of {', '.join(allowed)}; got {text!r}")
    return name, split(values, "compare")
