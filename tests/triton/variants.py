"""Every kernel variant by name: a call of the backend that launches it, on shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from scene import Scene

from kvpool.backends.base import Attention
from kvpool.codecs import CODECS
from kvpool.kinds import IndexerKind, KVKind, LatentKind, Lifetime
from kvpool.layout import LAYOUTS

Run = Callable[[Any], None]
DECODE = {"rows": (1, 1), "lengths": (4000, 700)}
PREFILL = {"rows": (512, 300), "lengths": (512, 700)}
KV_CODECS = [name for name in CODECS if not name.startswith("index")]
INDEX_CODECS = [name for name in CODECS if name.startswith("index")]


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


def write_and_read(target: Any, scene: Scene, *names: str) -> None:
    made = begin(target, scene)
    for part in scene.parts(*names):
        x = torch.empty((scene.step.total_tokens, part.num_heads, part.vector.dim), dtype=scene.dtype)
        made.write((part,), (x,), scene.step)
        made.read(part, scene.step.groups[part.group].slots, torch.empty_like(x))


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
    yield "blocks of 16", {"tokens_per_block": 16}, {}
    yield "blocks of 128", {"tokens_per_block": 128}, {}
    yield "fp16 query", {"dtype": torch.float16}, {}
    yield "fp32 query", {"dtype": torch.float32}, {}


def variants(full: bool) -> Iterator[tuple[str, Run]]:
    """Yield (name, call). The quick choice has every codec and every kind once; `full` their product."""
    gqa, mla = KVKind(8, 128), LatentKind(512, 64)
    bf16 = {"dtype": torch.bfloat16, "tokens_per_block": 64}
    layouts = list(LAYOUTS) if full else list(LAYOUTS)[:1]
    for layout in layouts:
        for codec in KV_CODECS:
            common = {"codec": codec, "layout": layout, **bf16}
            yield f"write kv {codec} {layout}", lambda t, c=common: write_and_read(t, Scene(gqa, **c, **DECODE), "k")
            yield f"decode kv {codec} {layout}", kv(Scene(gqa, **common, **DECODE), 32)
            if full:
                yield f"prefill kv {codec} {layout}", kv(Scene(gqa, **common, **PREFILL), 32)
                yield (
                    f"write latent {codec} {layout}",
                    lambda t, c=common: write_and_read(t, Scene(mla, **c, **DECODE), "latent"),
                )
                for heads in (16, 128):
                    yield (
                        f"decode latent {codec} {layout} {heads} heads",
                        latent(Scene(mla, **common, **DECODE), heads, "latent"),
                    )
                yield f"prefill latent {codec} {layout}", latent(Scene(mla, **common, **PREFILL), 16, "latent")
    index = (mla, IndexerKind(128))
    for layout in layouts:
        for codec in INDEX_CODECS if full else INDEX_CODECS[:1]:
            scene = Scene(index, {"latent": "fp8", "rope": "bf16", "index": codec}, layout, **bf16, **DECODE)
            yield f"write index {codec} {layout}", lambda t, s=scene: write_and_read(t, s, "index")
            yield f"score {codec} {layout}", score(scene, 64)
            if full:
                prefill = Scene(index, {"latent": "fp8", "rope": "bf16", "index": codec}, layout, **bf16, **PREFILL)
                yield f"score prefill {codec} {layout}", score(prefill, 64)
    for name, changes, asked in options() if full else []:
        for shape_name, shape in (("decode", DECODE), ("prefill", PREFILL)):
            for codec in ("bf16", "fp8", "nvfp4"):
                scene = Scene(gqa, codec, **{**bf16, **shape, **changes})
                rows = scene.step.total_tokens
                given = {k: v[:rows] if k == "tree" else v for k, v in asked.items()}
                yield f"{shape_name} {codec} {name}", kv(scene, 32, **given)
    split = {"latent": "fp8", "rope": "bf16"}
    indices = torch.zeros((2, 2048), dtype=torch.int64)
    for codec in ("bf16", "fp8", split):
        scene = Scene(mla, codec, **bf16, **DECODE)
        parts = ("latent", "rope") if codec is split else ("latent",)
        name = "fp8+bf16" if codec is split else codec
        for heads in (16, 128) if full else (128,) if codec is split else ():
            yield f"decode latent {name} {heads} heads", latent(scene, heads, *parts)
            yield f"sparse latent {name} {heads} heads", latent(scene, heads, *parts, indices=indices)
    yield "copies", copies(Scene(gqa, "fp8", **bf16, **DECODE))
    if full:
        for dim in (32, 64, 80, 96, 192, 256):
            for shape_name, shape in (("decode", DECODE), ("prefill", PREFILL)):
                yield f"{shape_name} head of {dim}", kv(Scene(KVKind(4, dim), "bf16", **bf16, **shape), 20)
