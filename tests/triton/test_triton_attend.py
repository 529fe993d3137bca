"""Attention kernels agree with the reference for every codec, layout, kind and option, over poisoned memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scene import KV, LATENT, WIDE_LATENT, Scene

from kvpool.backends.base import Attention
from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend, backend, launch
from kvpool.backends.triton.target import INTERPRETER, Target
from kvpool.codecs import CODECS
from kvpool.kinds import FULL, KVKind, LatentKind, Lifetime
from kvpool.layout import LAYOUTS

KV_CODECS = [name for name in CODECS if not name.startswith("index")]
REFERENCE = ReferenceBackend()


def attend(
    scene: Scene, k: tuple[Any, ...], v: Any, v_dim: int, num_q_heads: int, *, tolerance: float = 2e-6,
    target: Target = INTERPRETER, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attend with both backends, compare, and return the kernel's output."""
    dim = sum(part.vector.dim for part in k)
    q = scene.normal(scene.step.total_tokens, num_q_heads, dim)
    asked = Attention(dim**-0.5, scene.lifetime, **options)
    backend = TritonBackend(target=target)
    backend.prepare(scene.pools, scene.step.buffers)
    backend.begin(scene.step)
    want = torch.empty(scene.step.total_tokens, num_q_heads, v_dim, dtype=scene.dtype)
    got = torch.full_like(want, float("nan"))
    want_lse = torch.empty(scene.step.total_tokens, num_q_heads)
    got_lse = torch.full_like(want_lse, float("nan"))
    REFERENCE.attend(q, k, v, v_dim, scene.step, asked, want, want_lse)
    backend.attend(q, k, v, v_dim, scene.step, asked, got, got_lse)
    assert got.isfinite().all()
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
    assert torch.equal(got_lse.isinf(), want_lse.isinf())
    assert (got_lse - want_lse).nan_to_num(0.0).abs().max() <= 1e-5
    return got


@pytest.mark.parametrize("codec", KV_CODECS)
def test_decode_agrees_for_every_codec(codec: str) -> None:
    scene = Scene(KV, codec, "NHD")
    k, v = scene.filled("k", "v")
    attend(scene, (k,), v, 64, 4)


@pytest.mark.parametrize("codec", ["bf16", "fp8", "nvfp4-token"])
def test_latents_agree_with_one_scale_and_with_several(codec: str) -> None:
    for kind, rank in ((LATENT, 48), (WIDE_LATENT, 256)):
        scene = Scene(kind, codec, rows=(1, 2, 1))
        (latent,) = scene.filled("latent")
        attend(scene, (latent,), latent, rank, 20)


def test_pieces_narrower_than_what_a_scale_is_of_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PIECE", 32)
    for codec in ("fp8", "int8-tensor", "nvfp4"):
        scene = Scene(WIDE_LATENT, codec, rows=(1, 2, 1))
        (latent,) = scene.filled("latent")
        attend(scene, (latent,), latent, 256, 20)


def test_a_latent_and_a_rope_part_of_another_codec_agree() -> None:
    scene = Scene(WIDE_LATENT, {"latent": "fp8", "rope": "bf16"})
    parts = scene.filled("latent", "rope")
    attend(scene, parts, parts[0], 256, 4)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["kv", "latent", "wide", "split"])
@pytest.mark.parametrize("codec", KV_CODECS)
def test_every_codec_kind_and_layout_agrees(codec: str, kind: str, layout: str) -> None:
    for seed, (rows, lengths) in enumerate([((1, 1, 1, 1), (1, 8, 9, 131)), ((9, 2, 40), (9, 30, 40))]):
        shape: Any = {"layout": layout, "rows": rows, "lengths": lengths, "seed": seed}
        if kind == "kv":
            scene = Scene(KV, codec, **shape)
            k, v = scene.filled("k", "v")
            attend(scene, (k,), v, 64, 6)
        elif kind == "split":
            scene = Scene(WIDE_LATENT, {"latent": codec, "rope": "bf16" if codec == "fp16" else "fp16"}, **shape)
            parts = scene.filled("latent", "rope")
            attend(scene, parts, parts[0], 256, 4)
        else:
            spec = LATENT if kind == "latent" else WIDE_LATENT
            scene = Scene(spec, codec, **shape)
            (latent,) = scene.filled("latent")
            attend(scene, (latent,), latent, spec.kv_lora_rank, 4)


#: What decides about the tiles of a compute capability, interpreted.
GPUS = {c: replace(Target.of(c, 4), interpreted=True, hardware=0) for c in (80, 90, 100)}


@pytest.mark.long
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("tokens_per_block", [16, 128])
def test_tiles_as_large_as_a_gpu_s_agree(monkeypatch: pytest.MonkeyPatch, tokens_per_block: int, gpu: int) -> None:
    """The interpreter multiplies exactly, for which its tiles are small; here it takes those of tensor cores."""
    shapes = []

    def choose_shape(*arguments: Any) -> launch.Shape:
        shapes.append(launch.choose_shape(*arguments))
        return shapes[-1]

    monkeypatch.setattr(launch.AttendArguments, "products", "short")
    monkeypatch.setattr(backend, "choose_shape", choose_shape)
    for codec in ("bf16", "fp8", "nvfp4"):
        for kind, heads in ((KVKind(2, 64), 10), (KVKind(1, 256), 4)):
            for rows, lengths, lifetime in (
                ((1, 1, 1), (1, 130, 64), FULL),
                ((40, 3, 1), (130, 3, 70), FULL),
                ((40, 3, 1), (130, 3, 70), Lifetime(window=50, sink_tokens=3)),
            ):
                scene = Scene(kind, codec, "HND", lifetime, tokens_per_block, rows, lengths)
                k, v = scene.filled("k", "v")
                attend(scene, (k,), v, kind.head_dim, heads, target=GPUS[gpu])
        scene = Scene(LatentKind(512, 64), codec, rows=(20, 1), lengths=(90, 40), tokens_per_block=tokens_per_block)
        (latent,) = scene.filled("latent")
        attend(scene, (latent,), latent, 512, 16, target=GPUS[gpu])
    assert {shape.block_m for shape in shapes} == {16, 32, GPUS[gpu].tile_rows}
    assert {shape.block_n for shape in shapes} == {32, 64}


@pytest.mark.long
@pytest.mark.parametrize("v", KV_CODECS)
@pytest.mark.parametrize("k", KV_CODECS)
def test_every_codec_of_keys_goes_with_every_codec_of_values(k: str, v: str) -> None:
    scene = Scene(KVKind(2, 64, 32), {"k": k, "v": v})
    key, value = scene.filled("k", "v")
    attend(scene, (key,), value, 32, 4)


@pytest.mark.parametrize(
    "lifetime",
    [Lifetime(window=1), Lifetime(window=9), Lifetime(window=9, sink_tokens=3), Lifetime(chunk=16)],
    ids=lambda x: x.name,
)
def test_windows_chunks_and_sink_tokens_hide_what_they_should(lifetime: Lifetime) -> None:
    scene = Scene(KV, "fp8", lifetime=lifetime, rows=(1, 20, 1), lengths=(21, 40, 1))
    k, v = scene.filled("k", "v")
    attend(scene, (k,), v, 64, 4)


def test_blocks_that_fell_out_of_the_window_are_not_read() -> None:
    scene = Scene(KV, "bf16", lifetime=Lifetime(window=9), rows=(1, 2), lengths=(61, 40))
    k, v = scene.filled("k", "v")
    for s, n in enumerate(scene.lengths):
        scene.step.groups[0].block_table[s, : (n - scene.rows[s] - 9) // 8] = -1
    attend(scene, (k,), v, 64, 4)


def test_sinks_and_softcap_agree() -> None:
    scene = Scene(KV, "int8", rows=(1, 3, 1), lengths=(150, 40, 1), spread=3.0)
    k, v = scene.filled("k", "v")
    attend(scene, (k,), v, 64, 4, sinks=torch.tensor([0.5, -1.0, 30.0, -60.0]), softcap=5.0)


@pytest.mark.parametrize("codec", ["bf16", "fp8", "nvfp4-token"])
def test_everything_that_may_be_asked_agrees_over_latents(codec: str) -> None:
    tree = torch.tensor([[1], [1], [3], [5], [1], [3]])  # drafts 1 and 2 of the second sequence are siblings
    for lifetime, asked in (
        (Lifetime(window=9), {}),
        (Lifetime(window=9, sink_tokens=3), {"sinks": torch.tensor([0.5, -1.0, 30.0, -60.0])}),
        (Lifetime(chunk=16), {"softcap": 5.0}),
        (FULL, {"tree": tree}),
    ):
        scene = Scene(WIDE_LATENT, codec, lifetime=lifetime, rows=(1, 3, 2), lengths=(21, 40, 2))
        (latent,) = scene.filled("latent")
        attend(scene, (latent,), latent, 256, 4, **asked)


def test_a_tree_mask_shows_each_draft_its_ancestors() -> None:
    scene = Scene(KV, "bf16", rows=(1, 70, 5), lengths=(21, 90, 30))
    k, v = scene.filled("k", "v")
    tree = torch.randint(-(2**62), 2**62, (76, 2), generator=scene.random)
    row = torch.cat([torch.arange(1), torch.arange(70), torch.arange(5)])
    tree[torch.arange(76), row // 64] |= torch.tensor(1) << (row % 64)  # a draft sees itself
    attend(scene, (k,), v, 64, 4, tree=tree)


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
def test_sparse_rows_see_their_slots_and_no_other(codec: str) -> None:
    scene = Scene(WIDE_LATENT, codec, rows=(1, 3, 1), lengths=(21, 40, 1))
    (latent,) = scene.filled("latent")
    slots = scene.all_slots()
    indices = torch.full((5, 40), -1)
    indices[0, 3:8] = slots[torch.randperm(21, generator=scene.random)[:5]]
    for row in (1, 2, 3):
        indices[row, : 10 + row] = slots[21 + torch.randperm(37, generator=scene.random)[: 10 + row]]
    got = attend(scene, (latent,), latent, 256, 8, indices=indices)
    assert (got[4] == 0).all()  # a row that sees nothing


def test_long_sequences_are_split_and_joined() -> None:
    scene = Scene(KV, "bf16", rows=(1, 1), lengths=(700, 40), tokens_per_block=64)
    k, v = scene.filled("k", "v")
    attend(scene, (k,), v, 64, 6)


@pytest.mark.parametrize(("dim", "v_dim"), [(32, 32), (80, 80), (96, 64), (192, 128)])
def test_head_sizes_that_are_no_power_of_two_agree(dim: int, v_dim: int) -> None:
    scene = Scene(KVKind(3, dim, v_dim), {"k": "fp8", "v": "int8"})
    k, v = scene.filled("k", "v")
    attend(scene, (k,), v, v_dim, 15)


def test_a_ragged_batch_with_empty_rows_and_equal_lengths_agrees() -> None:
    scene = Scene(KV, "bf16", rows=(0, 5, 0, 1), lengths=(7, 5, 3, 1))
    k, v = scene.filled("k", "v")
    attend(scene, (k,), v, 64, 2)


@pytest.mark.parametrize("mixed", [False, True], ids=["smoothing", "mixing"])
def test_maps_leave_the_answer_where_it_was(mixed: bool) -> None:
    scene = Scene(KV, "int8")
    k, v = scene.parts("k", "v")
    if mixed:
        k.constants.set(mixing=torch.eye(64) + 0.05 * torch.randn(2, 64, 64), rotation=True)
    else:
        k.constants.set(smoothing=torch.rand(2, 64) + 0.5, rotation=True)
    v.constants.set(smoothing=torch.rand(2, 64) + 0.5, rotation=True)
    slots = scene.all_slots()
    step = scene.step
    everything = type(step)(**{**vars(step), "groups": [type(step)(slots=slots)]})
    for part in (k, v):
        REFERENCE.write((part,), (scene.normal(len(slots), 2, 64),), everything)
    attend(scene, (k,), v, 64, 4)
