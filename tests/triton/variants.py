"""Every kernel variant by name: a call of the backend that launches it, on shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from scene import Scene

from kvpool.backends.base import Attention
from kvpool.codecs import CODECS
from kvpool.kinds import KVKind, LatentKind
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
