"""Small pools whose bytes are kept in `golden/`, one file a case: blocks 0, 1, 2 of the only group, one after another.

The bytes come from the definitions in numpy and the plan's offsets and strides; no codec and no pool of the package
makes them. `python tests/codecs/golden_cases.py` writes the files again; do that only when a format changes, which is
a new format number and a line in the changelog.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import codec_definitions as define
import numpy as np

from kvpool.kinds import IndexerKind, Kind, KVKind, LatentKind, LayerSpec
from kvpool.layout import address
from kvpool.plan import Plan, make_plan
from kvpool.spec import CacheSpec

GOLDEN = Path(__file__).parent / "golden"
NUM_LAYERS, NUM_BLOCKS = 2, 3
#: Token i of the input goes to slot SLOTS[i]; -1 is written nowhere. Slot 1 and others stay as they were: zero.
SLOTS = (4, 0, -1, 5, 3)
CONSTANT = ("fp8-tensor", "fp8e5m2-tensor", "int8-tensor", "nvfp4")
#: Range of the constant scale over the largest element, which is 4.
LARGEST = {"fp8-tensor": 448.0, "fp8e5m2-tensor": 57344.0, "int8-tensor": 127.0, "nvfp4": 2688.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One small pool."""

    name: str
    kinds: tuple[Kind, ...]
    codec: str | dict[str, str]
    layout: str
    tokens_per_block: int = 2
    mapped: bool = False
    mixed: bool = False

    def plan(self) -> Plan:
        spec = CacheSpec((LayerSpec(self.kinds),) * NUM_LAYERS, "bf16")
        return make_plan(spec, 1 << 20, codec=self.codec, layout=self.layout, tokens_per_block=self.tokens_per_block)


def _cases() -> list[Case]:
    kv, latent = (KVKind(3, 32),), (LatentKind(128, 32),)
    names = ("fp32", "fp16", "bf16", "fp8", *CONSTANT, "int8", "nvfp4-token")
    cases = [Case(f"kv-{n}-{o}", kv, n, o) for n in names for o in ("HND", "NHD")]
    cases += [Case(f"kv-mixed-{o}", kv, {"k": "fp8", "v": "nvfp4-token"}, o) for o in ("HND", "NHD")]
    cases += [Case(f"kv-{n}-HND-mapped", kv, n, "HND", mapped=True) for n in names[3:]]
    cases += [Case(f"kv-{n}-HND-mixed", kv, n, "HND", mixed=True) for n in ("fp8", "int8", "nvfp4-token")]
    cases += [Case(f"latent-{n}-HND", latent, n, "HND") for n in ("bf16", "fp8", "fp8-tensor", "int8", "nvfp4-token")]
    cases += [Case("latent-split-HND", latent, {"latent": "fp8", "rope": "bf16"}, "HND")]
    indexed = (LatentKind(128, 32), IndexerKind(128))
    cases += [Case(f"{n}-HND", indexed, {"*": "bf16", "index": n}, "HND", 32) for n in ("index-fp8", "index-fp4")]
    return cases


CASES = _cases()


def parts(plan: Plan) -> list[tuple[int, str]]:
    pools = [pool for group in plan.groups for pool in group.pools]
    return sorted((layer, part) for pool in pools for layer in pool.layers for part in pool.parts)


def _noise(num_tokens: int, heads: int, dim: int, seed: int) -> np.ndarray:
    """Numbers in (-1, 1) from a multiplicative hash, equal on every machine."""
    i = np.arange(num_tokens * heads * dim, dtype=np.uint64) + np.uint64(1 + 7919 * seed)
    mixed = (i * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return (mixed.astype(np.float64) / 2.0**23 - 1.0).reshape(num_tokens, heads, dim)


def tensors(layer: int, part: str, heads: int, dim: int) -> np.ndarray:
    """The vectors written to a part: `[T, H, D]` fp32 holding bf16 values up to 4 in size."""
    seed = layer * 16 + ("k", "v", "latent", "rope", "index").index(part)
    x = _noise(len(SLOTS), heads, dim, seed) ** 3 * 4
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    x = bits.view(np.float32).copy()
    x[1, 0, ::3] *= np.float32(2.0**-10)
    return x


def constants(case: Case, layer: int, part: str, codec: str, heads: int, dim: int) -> dict[str, object]:
    """Scale, smoothing and rotation of a part: all different from one another and from 1."""
    out: dict[str, object] = {}
    if codec in CONSTANT:
        factor = {"k": 1.0, "v": 0.75, "latent": 0.875, "rope": 0.625}[part]
        out["scale"] = float(np.float32(4.0 * factor * (1 + layer) / LARGEST[codec]))
    if case.mapped:
        i = np.arange(heads * dim).reshape(heads, dim)
        out["smoothing"] = (0.5 + (i * 37 + layer * 11 + len(part)) % 32 / 16).astype(np.float32)
        out["rotation"] = part == "k" or layer == 1
    if case.mixed and part == "k":
        out["mixing"] = mixing(heads, dim)[0]
    return out


def mixing(heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix of each head and its inverse, both of numbers that fp32 has exactly."""
    step = np.arange(dim)[None, :] - np.arange(dim)[:, None]
    matrix = np.where(step == 0, 1.0, np.where(step == 1, 0.5, 0.0))
    inverse = np.where(step >= 0, (-0.5) ** np.maximum(step, 0), 0.0)
    size = 2.0 ** np.arange(heads)[:, None, None]
    return (matrix * size).astype(np.float32), (inverse / size).astype(np.float32)


def golden_bytes(case: Case) -> bytes:
    """The bytes of blocks 0..2 from the definitions and the plan's numbers."""
    plan = case.plan()
    (group,) = plan.groups
    memory = bytearray(NUM_BLOCKS * group.bytes_per_block)
    for layer, part in parts(plan):
        _, pool, on_l, on_f = plan.find(layer, part)
        heads, dim = pool.num_heads, pool.vector.dim
        given = constants(case, layer, part, pool.codec, heads, dim)
        block = dim & -dim if given.get("rotation") else 0
        x = tensors(layer, part, heads, dim)
        if case.mapped:
            x = define.mapped(x, given["smoothing"], block)
        if "mixing" in given:
            x = define.multiplied(x, mixing(heads, dim)[1])
        planes = define.encode(pool.codec, x, pool.vector.segments, given.get("scale"))
        for plane in pool.planes:
            values = planes[plane.name].reshape(len(SLOTS), heads, -1)
            for t, h in itertools.product(range(len(SLOTS)), range(heads)):
                if SLOTS[t] >= 0:
                    at = (SLOTS[t] // group.tokens_per_block, on_l, on_f, h, SLOTS[t] % group.tokens_per_block)
                    begin = address(plane.offset, at, plane.strides[:5])
                    raw = np.ascontiguousarray(values[t, h]).tobytes()
                    memory[begin : begin + len(raw)] = raw
    return bytes(memory)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for _case in CASES:
        (GOLDEN / f"{_case.name}.bin").write_bytes(golden_bytes(_case))
