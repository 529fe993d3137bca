"""What works with what: kind x codec x layout x backend, and the model families that were tried. Knows no tensor.

One table: caches refuse what is not in it when they are made, `kvpool plan` prints a model's rows of it, the page in
docs is made of it, and the tests run every row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from kvpool.codecs import CODECS, Codec, get_codec
from kvpool.codecs.maps import rotation_block
from kvpool.errors import PlanError
from kvpool.kinds import IndexerKind, KVKind, LatentKind, Lifetime, StateKind
from kvpool.layout import LAYOUTS
from kvpool.plan import Plan, describe, make_plan
from kvpool.plan.geometry import PoolPlan
from kvpool.spec import CacheSpec

#: Codecs with a C++ header, in the order of `CodecId` in native/kernels/types.hpp.
NATIVE_CODECS = (
    "fp32", "fp16", "bf16", "fp8", "fp8-tensor", "fp8e5m2-tensor", "int8", "int8-tensor", "nvfp4", "nvfp4-token",
    "index-fp8", "index-fp4",
)  # fmt: skip
#: `kMaxDim` there: elements of a vector, and of a key.
NATIVE_DIM = 1024
#: Containers and scale planes of the quantised caches FlashInfer takes.
FLASHINFER_CODES = ("e4m3", "e5m2", "e2m1x2")
FLASHINFER_SCALES = ((), (("scale", "fp32"),), (("block_scale", "e4m3"),))
#: Latent and rope part of the FP8 latents it takes, of one scale a layer.
FLASHINFER_LATENT = (512, 64)
#: Plain containers it takes.
FLASHINFER_PLAIN = ("fp16", "bf16")
MODES = ("kernel", "gather", "refused")


def _anything(pool: PoolPlan, lifetime: Lifetime | None) -> str:
    return ""


def _native(pool: PoolPlan, lifetime: Lifetime | None) -> str:
    if pool.codec not in NATIVE_CODECS:
        return f"codec {pool.codec!r} has no native kernels; use backend='reference', or add a C++ header"
    if lifetime is not None and pool.vector.dim > NATIVE_DIM:
        return f"native kernels take vectors of at most {NATIVE_DIM} elements, not {pool.vector.dim}"
    return ""


def _triton(pool: PoolPlan, lifetime: Lifetime | None) -> str:
    codec = get_codec(pool.codec)
    if type(codec).triton is Codec.triton:
        return f"codec {pool.codec!r} has no Triton maths; use backend='reference'"
    planes = [p for p in codec.planes(pool.vector) if p.name == "scale"]
    scales = planes[0].containers if planes else 0
    if isinstance(pool.kind, StateKind):
        rows = len(pool.vector.segments)
        if planes and max(scales, 1) != rows:
            return f"{pool.codec} keeps one scale for the {rows} rows of a state, which no Triton kernel stores"
        return ""
    if scales > 1 and isinstance(pool.kind, KVKind):
        return f"{pool.codec} keeps {scales} scales a vector of {pool.vector.dim}, which no Triton kernel attends to"
    piece = pool.vector.segments[0]
    if scales > 1 and isinstance(pool.kind, IndexerKind) and (piece < 16 or piece & (piece - 1)):
        return f"{pool.codec} keeps a scale for {piece} elements; Triton kernels take a power of two from 16"
    return ""


def _flashinfer(pool: PoolPlan, lifetime: Lifetime | None) -> str:
    if isinstance(pool.kind, StateKind):
        return _triton(pool, lifetime)
    if isinstance(pool.kind, IndexerKind):
        return "FlashInfer has no kernel for sparse slots; use backend='triton'"
    if lifetime is not None and lifetime.chunk is not None:
        return "FlashInfer has no kernel for chunked attention; use backend='triton'"
    if lifetime is not None and lifetime.sink_tokens:
        return "FlashInfer has no kernel for sink tokens before a window; use backend='triton'"
    if isinstance(pool.kind, LatentKind) and lifetime is not None and lifetime.window is not None:
        return "FlashInfer has no kernel for windows over latents; use backend='triton'"
    if isinstance(pool.kind, LatentKind) and pool.vector.dim != pool.kind.kv_lora_rank + pool.kind.qk_rope_head_dim:
        return "FlashInfer takes latents and their rope part in one format only; use backend='triton'"
    data, *scales = ((p.name, p.dtype) for p in get_codec(pool.codec).planes(pool.vector))
    if isinstance(pool.kind, LatentKind):
        codes = data[1] == "e4m3" and not scales
        sizes = (pool.kind.kv_lora_rank, pool.kind.qk_rope_head_dim)
        if codes and sizes != FLASHINFER_LATENT:
            return f"FlashInfer takes FP8 latents of {FLASHINFER_LATENT} only, not of {sizes}; use backend='triton'"
    else:
        codes = data[1] in FLASHINFER_CODES and tuple(scales) in FLASHINFER_SCALES
    if data[1] in FLASHINFER_PLAIN or codes:
        return ""
    return f"FlashInfer takes no {describe.kind_name(pool)} cache of codec {pool.codec!r}; use backend='triton'"


#: Backend -> why it cannot work on a pool (of a group with this lifetime, None for states); empty when it can. Layouts
#: are strides to all of them.
SUPPORT: dict[str, Callable[[PoolPlan, Lifetime | None], str]] = {
    "reference": _anything,
    "cpu": _native,
    "triton": _triton,
    "flashinfer": _flashinfer,
}


def refusal(backend: str, plan: Plan) -> str:
    """Return why a backend cannot work on a plan, and for which layers; empty when it can, or is not in the table."""
    check = SUPPORT.get(backend, _anything)
    for group in plan.groups:
        for pool in group.pools:
            reason = check(pool, group.lifetime)
            if reason:
                count = f"and {len(pool.layers) - 1} more: " if len(pool.layers) > 1 else ""
                return f"{'+'.join(pool.parts)} of layer {pool.layers[0]}{':' if not count else ''} {count}{reason}"
    return ""


@dataclass(frozen=True, slots=True)
class Row:
    """What one codec can do for a model, in every layout.

    Attributes:
        codec: Of keys, values and latents.
        refused: Why it cannot be planned; empty when it can.
        backends: Backend -> why it cannot work on it; empty when it can.
    """

    codec: str
    refused: str
    backends: Mapping[str, str]


def to_dict(spec: CacheSpec) -> dict[str, object]:
    """Return a model's rows as plain data."""
    return {
        "layouts": list(LAYOUTS),
        "codecs": {
            row.codec: {backend: row.refused or row.backends[backend] or "yes" for backend in SUPPORT}
            for row in rows(spec)
        },
        "rotation": rotation(spec),
        "transformers": {
            f.name: f"{f.mode}: {f.note}" if f.note else f.mode for f in families() if f.model == spec.model
        },
    }


def rows(spec: CacheSpec) -> tuple[Row, ...]:
    """Return the rows of a model: one for every registered codec."""
    found = []
    for codec in CODECS:
        try:
            plan = make_plan(spec, codec=codec, num_blocks=1)
        except PlanError as error:
            found.append(Row(codec, str(error), {}))
        else:
            found.append(Row(codec, "", {backend: refusal(backend, plan) for backend in SUPPORT}))
    return tuple(found)


def rotation(spec: CacheSpec) -> str:
    """Return whether what a model attends to can be rotated: the sizes of the blocks, or what stands in the way."""
    sizes = set()
    for group in make_plan(spec, num_blocks=1).groups:
        for pool in () if group.is_state else group.pools:
            try:
                sizes.add(rotation_block(pool.vector))
            except PlanError as error:
                return f"not of {'+'.join(pool.parts)}: {error}"
    return f"in blocks of {', '.join(map(str, sorted(sizes)))}" if sizes else "of nothing: only states are stored"


def text(spec: CacheSpec) -> str:
    """Return a model's rows as a table for people, with numbered reasons, and how transformers runs it."""
    reasons: dict[str, int] = {}

    def cell(reason: str) -> str:
        return f"no ({reasons.setdefault(reason, len(reasons) + 1)})" if reason else "yes"

    table = [["codec", *SUPPORT]]
    for row in rows(spec):
        table.append([row.codec, *(cell(row.refused or row.backends[backend]) for backend in SUPPORT)])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = [f"support, for layouts {', '.join(LAYOUTS)}"]
    lines += ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += [f"  ({number}) {reason}" for reason, number in reasons.items()]
    lines.append(f"smoothing of every quantised codec, mixing of its keys (no latents); rotation {rotation(spec)}")
    tried = [family for family in families() if family.model == spec.model]
    for family in tried:
        lines.append(f"transformers: {family.mode}" + (f" ({family.note})" if family.note else ""))
    if not tried:
        lines.append(f"transformers: {spec.model or 'this model'} is none of the families that are tested")
    return "\n".join(dict.fromkeys(lines))


# --- families ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """A family that is known to run, or known not to, on transformers' real modeling code.

    Attributes:
        name: Its name in the tests.
        model: Its `model_type`.
        mode: `kernel`: attention reads the pages, states their pool; `gather`: the model's own attention gets dense
            keys and values (which every family of mode `kernel` can do as well); `refused`.
        note: What to know; for `gather` and `refused` the reason.
    """

    name: str
    model: str
    mode: str
    note: str = ""


def families() -> tuple[Family, ...]:
    """Return every family that was tried."""
    data = json.loads(files("kvpool").joinpath("tested_families.json").read_text(encoding="utf-8"))
    return tuple(
        Family(name, row.get("model", name), row["mode"], row.get("note", "")) for name, row in data["families"].items()
    )
