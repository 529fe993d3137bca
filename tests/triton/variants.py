"""Every kernel variant by name: a call of the backend that launches it, on shapes of real models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from scene import Scene

from kvpool.backends.base import Attention
from kvpool.codecs import CODECS
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, StateKind
from kvpool.layout import LAYOUTS
from kvpool.plan import make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec

Run = Callable[[Any], None]
DECODE = {"rows": (1, 1), "lengths": (4000, 700)}
PREFILL = {"rows": (512, 300), "lengths": (512, 700)}
SHAPES = {"decode": DECODE, "prefill": PREFILL}
KV_CODECS = [name for name in CODECS if not name.startswith("index")]
INDEX_CODECS = [name for name in CODECS if name.startswith("index")]
GQA, MLA, INDEX = KVKind(8, 128), LatentKind(512, 64), IndexerKind(128)
BF16 = {"dtype": torch.bfloat16, "tokens_per_block": 64, "poisoned": False}
BLOCKS_OF_16 = {"tokens_per_block": 16}
SPLIT = {"latent": "fp8", "rope": "bf16"}


def backend(target: Any) -> Any:
    from kvpool.backends.triton.backend import TritonBackend

    return TritonBackend(target=target)


def begin(target: Any, scene: Scene) -> Any:
    made = backend(target)
    made.prepare(scene.pools, scene.step.buffers)
    made.begin(scene.step)
    return made


def attend(target: Any, scene: Scene, k: tuple[Any, ...], v: Any, v_dim: int, heads: int, **options: Any) -> None:
    made = begin(target, scene)
    dim = sum(part.vector.dim for part in k)
    rows = scene.step.total_tokens
    q = torch.empty((rows, heads, dim), dtype=scene.dtype)
    out = torch.empty((rows, heads, v_dim), dtype=scene.dtype)
    lse = torch.empty((rows, heads))
    made.attend(q, k, v, v_dim, scene.step, Attention(dim**-0.5, scene.lifetime, **options), out, lse)


def write_and_read(kind: Any, common: dict[str, Any], name: str) -> Run:
    def run(target: Any) -> None:
        scene = Scene(kind, **common, **DECODE)
        made = begin(target, scene)
        (part,) = scene.parts(name)
        x = torch.empty((scene.step.total_tokens, part.num_heads, part.vector.dim), dtype=scene.dtype)
        made.write((part,), (x,), scene.step)
        made.read(part, scene.step.groups[part.group].slots, torch.empty_like(x))

    return run


def mixed(codec: str) -> Run:
    def run(target: Any) -> None:
        scene = Scene(GQA, codec, **BF16, **DECODE)
        k, v = scene.parts("k", "v")
        k.constants.set(mixing=torch.eye(128), rotation=True)
        rows = scene.step.total_tokens
        x = torch.empty((rows, 8, 128), dtype=scene.dtype)
        begin(target, scene).write((k,), (x,), scene.step)
        attend(target, scene, (k,), v, 128, 32)

    return run


def kv(scene: Scene, heads: int, **options: Any) -> Run:
    def run(target: Any) -> None:
        k, v = scene.parts("k", "v")
        attend(target, scene, (k,), v, v.vector.dim, heads, **options)

    return run


def latent(scene: Scene, heads: int, *names: str, **options: Any) -> Run:
    def run(target: Any) -> None:
        parts = scene.parts(*names)
        attend(target, scene, parts, parts[0], 512, heads, **options)

    return run


def score(scene: Scene, heads: int) -> Run:
    def run(target: Any) -> None:
        made = begin(target, scene)
        (part,) = scene.parts("index")
        rows = scene.step.total_tokens
        q = torch.empty((rows, heads, part.vector.dim), dtype=scene.dtype)
        made.score(
            q, torch.empty(rows, heads), part, scene.step, scene.lifetime, torch.empty((rows, 64), dtype=torch.int64)
        )

    return run


def states(shape: tuple[int, ...], codec: str) -> Run:
    def run(target: Any) -> None:
        spec = CacheSpec((LayerSpec((StateKind("ssm", shape),)),), max_seq_len=512)
        pools = Pools(make_plan(spec, codec={"ssm": codec}, num_blocks=4))
        part, made = pools.part(0, "ssm"), backend(target)
        slots = torch.zeros(2, dtype=torch.int32)
        made.write_states(part, slots, torch.empty((2, part.vector.dim), dtype=torch.bfloat16))
        made.read_states(part, slots)

    return run


def copies(scene: Scene) -> Run:
    def run(target: Any) -> None:
        made = begin(target, scene)
        made.copy(scene.pools, 0, [(0, 1)])
        made.move(scene.pools, 0, [(0, 1)])

    return run


def options() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (name, changes of the scene, options of the call) of everything an attention call may ask."""
    yield "window", {"lifetime": Lifetime(window=512)}, {}
    yield "window and sink tokens", {"lifetime": Lifetime(window=512, sink_tokens=4)}, {}
    yield "chunk", {"lifetime": Lifetime(chunk=1024)}, {}
    yield "softcap", {}, {"softcap": 30.0}
    yield "sinks", {}, {"sinks": torch.zeros(32)}
    yield "tree", {}, {"tree": torch.zeros((812, 5), dtype=torch.int64)}
    yield "sparse", {}, {"indices": torch.zeros((812, 512), dtype=torch.int64)}
    yield "blocks of 16", BLOCKS_OF_16, {}
    yield "blocks of 128", {"tokens_per_block": 128}, {}
    yield "fp16 query", {"dtype": torch.float16}, {}
    yield "fp32 query", {"dtype": torch.float32}, {}


def formats() -> Iterator[tuple[str, Run]]:
    """Yield writing, reading and attending of every codec, in every layout, for every kind and number of rows."""
    makers: list[tuple[str, Callable[[Any], Run]]] = [
        ("write kv", lambda common: write_and_read(GQA, common, "k")),
        ("write latent", lambda common: write_and_read(MLA, common, "latent")),
        ("prefill kv", lambda common: kv(Scene(GQA, **common, **PREFILL), 32)),
        ("prefill kv in blocks of 16", lambda common: kv(Scene(GQA, **common | BLOCKS_OF_16, **PREFILL), 32)),
        ("decode kv in blocks of 16", lambda common: kv(Scene(GQA, **common | BLOCKS_OF_16, **DECODE), 32)),
        ("decode kv", lambda common: kv(Scene(GQA, **common, **DECODE), 32)),
        ("verify 5 kv", lambda common: kv(Scene(GQA, **common, rows=(5, 1), lengths=(4000, 700)), 32)),
        ("verify 9 kv", lambda common: kv(Scene(GQA, **common, rows=(9, 1), lengths=(4000, 700)), 32)),
        ("decode latent of 16 heads", lambda common: latent(Scene(MLA, **common, **DECODE), 16, "latent")),
        ("decode latent of 128 heads", lambda common: latent(Scene(MLA, **common, **DECODE), 128, "latent")),
        ("prefill latent", lambda common: latent(Scene(MLA, **common, **PREFILL), 16, "latent")),
    ]
    for codec, (name, make), layout in itertools.product(KV_CODECS, makers, LAYOUTS):
        yield f"{name} {codec} {layout}", make({"codec": codec, "layout": layout, **BF16})
    for codec, layout in itertools.product(INDEX_CODECS, LAYOUTS):
        common = {"codec": {"latent": "fp8", "rope": "bf16", "index": codec}, "layout": layout, **BF16}
        yield f"write index {codec} {layout}", write_and_read((MLA, INDEX), common, "index")
        for name, shape in (("score", DECODE), ("score prefill", PREFILL)):
            yield f"{name} {codec} {layout}", score(Scene((MLA, INDEX), **common, **shape), 64)
    for shape in ((128, 64, 128), (8192, 3), (3, 8192)):  # a scan, and convolutions either way round
        for codec in ("fp32", "bf16", "int8") if shape[-1] > 3 else ("fp32", "bf16"):  # no wide load of 3 codes
            yield f"state {shape} {codec}", states(shape, codec)


def pairs(every: bool) -> Iterator[tuple[str, Run]]:
    """Yield attention to keys in one codec and values in another: every pair, or each codec once as either."""
    turned = KV_CODECS[3:] + KV_CODECS[:3]  # past those that differ least
    for k, v in itertools.product(KV_CODECS, KV_CODECS) if every else zip(KV_CODECS, turned, strict=True):
        yield f"decode kv {k}+{v}", kv(Scene(GQA, {"k": k, "v": v}, **BF16, **DECODE), 32)


def fit(given: dict[str, Any], rows: int, heads: int) -> dict[str, Any]:
    """Cut what is given for many rows and heads to those of a call."""
    counts = {"tree": rows, "indices": rows, "sinks": heads}
    return {name: value[: counts[name]] if name in counts else value for name, value in given.items()}


def asked() -> Iterator[tuple[str, Run]]:
    """Yield everything an attention call may ask, in few rows and in many, in formats of each kind."""
    for (name, changes, given), (shape_name, shape) in itertools.product(options(), SHAPES.items()):
        common = {**BF16, **shape, **changes}
        for codec in ("bf16", "fp8", "nvfp4"):
            scene = Scene(GQA, codec, **common)
            yield f"{shape_name} {codec} {name}", kv(scene, 32, **fit(given, scene.step.total_tokens, 32))
        for codec in ("bf16", "fp8"):
            scene = Scene(MLA, codec, **common)
            cut = fit(given, scene.step.total_tokens, 16)
            yield f"{shape_name} latent {codec} {name}", latent(scene, 16, "latent", **cut)
    indices = torch.zeros((2, 2048), dtype=torch.int64)
    for codec, heads in itertools.product((*KV_CODECS, SPLIT), (16, 128)):
        name, parts = ("fp8+bf16", ("latent", "rope")) if codec is SPLIT else (codec, ("latent",))
        scene = Scene(MLA, codec, **BF16, **DECODE)
        yield f"sparse latent {name} of {heads} heads", latent(scene, heads, *parts, indices=indices)
        if codec is SPLIT:
            yield f"decode latent {name} of {heads} heads", latent(scene, heads, *parts)


def sizes() -> Iterator[tuple[str, Run]]:
    """Yield head sizes and groups of other sizes than the usual."""
    for dim, codec, (name, shape) in itertools.product(
        (32, 64, 80, 96, 192, 256), ("bf16", "fp8", "nvfp4"), SHAPES.items()
    ):
        yield f"{name} {codec} head of {dim}", kv(Scene(KVKind(4, dim), codec, **BF16, **shape), 20)
    for group, codec in itertools.product((1, 8, 71), ("bf16", "fp8", "nvfp4")):
        yield f"decode {codec} group of {group}", kv(Scene(KVKind(1, 64), codec, **BF16, **DECODE), group)


def variants(every_pair: bool) -> Iterator[tuple[str, Run]]:
    """Yield (name, call), with every pair of codecs or with some."""
    yield from formats()
    yield from pairs(every_pair)
    yield from asked()
    yield from sizes()
    yield "mixing", mixed("fp8")
    yield "copies", copies(Scene(GQA, "fp8", **BF16, **DECODE))
