"""FlashInfer's pure-torch references read and write our caches as we do.

They know our bytes only by what that library documents. `test_exports.py` runs this file in a process that can
import it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer.trace.templates import attention, attn_scores, page, quantize
from scene import INDEXER, KV, LATENT, Scene

from kvpool.backends.base import Attention
from kvpool.backends.exports import combined_cache, paged_cache
from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.codecs import CODECS
from kvpool.codecs.base import Vector
from kvpool.codecs.floats import unpack_e2m1
from kvpool.kinds import FULL, LatentKind, Lifetime
from kvpool.layout import LAYOUTS

REFERENCE = ReferenceBackend()
RAGGED: Any = {"rows": (1, 3, 1), "lengths": (21, 40, 1)}
#: Some references read whole pages only.
WHOLE: Any = {"rows": (2, 3, 8), "lengths": (16, 40, 8)}


def ours(scene: Scene, k: tuple[Any, ...], v: Any, v_dim: int, q: torch.Tensor, **options: Any) -> torch.Tensor:
    out = torch.empty(*q.shape[:2], v_dim)
    asked = Attention(q.shape[-1] ** -0.5, scene.lifetime, **options)
    REFERENCE.attend(q, k, v, v_dim, scene.step, asked, out, None)
    return out


def pages(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indptr, indices) of the pages of every sequence."""
    counts = [-(-n // scene.tokens_per_block) for n in scene.lengths]
    indices = torch.cat([scene.step.groups[0].block_table[s, :n] for s, n in enumerate(counts)])
    return torch.tensor([0, *counts]).cumsum(0), indices


def appended(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sequence, position) of every row of the step."""
    rows = list(zip(scene.rows, scene.lengths, strict=True))
    sequences = [torch.full((new,), s) for s, (new, _) in enumerate(rows)]
    return torch.cat(sequences), torch.cat([torch.arange(n - new, n) for new, n in rows])


@pytest.mark.parametrize("lifetime", [FULL, Lifetime(window=9)], ids=lambda x: x.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["bf16", "fp16", "fp8-tensor"])
def test_trtllm_s_attention(codec: str, layout: str, lifetime: Lifetime) -> None:
    scene = Scene(KV, codec, layout, lifetime, **RAGGED)
    k, v = scene.filled("k", "v")
    q = scene.normal(5, 4, 64)
    cache, tables = paged_cache(k, v), scene.step.groups[0]
    got = attention._trtllm_paged_attention_reference(
        q, combined_cache(k, v), tables.block_table, tables.seq_lens, causal=True, kv_layout=layout,
        bmm1_scale=64**-0.5 * cache.k_scale, bmm2_scale=cache.v_scale, cum_seq_lens_q=scene.step.cu_seqlens,
        window_left=8 if lifetime.window else None,
    )  # fmt: skip
    assert (got - ours(scene, (k,), v, 64, q)).abs().max() < 1e-5


def test_prefill() -> None:
    scene = Scene(KV, "bf16", "NHD", **WHOLE)
    k, v = scene.filled("k", "v")
    q = scene.normal(13, 4, 64)
    cache = paged_cache(k, v)
    got, lse = attention._gqa_paged_prefill_reference(
        q, cache.k, cache.v, scene.step.cu_seqlens, *pages(scene), 64**-0.5
    )
    assert (got.float() - ours(scene, (k,), v, 64, q)).abs().max() < 1e-2  # theirs is bf16
    assert lse.isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_appending_keys_and_values(layout: str) -> None:
    scene = Scene(KV, "bf16", layout, dtype=torch.bfloat16, **RAGGED)
    k, v = scene.parts("k", "v")
    cache = paged_cache(k, v)
    want = cache.k.clone(), cache.v.clone()
    x = scene.normal(5, 2, 64), scene.normal(5, 2, 64)
    indptr, indices = pages(scene)
    page._append_paged_kv_cache_reference(*x, *appended(scene), want, indices, indptr, None, kv_layout=layout)
    for backend in (REFERENCE, TritonBackend("cpu")):
        backend.write((k, v), x, scene.step)
        for a, b in zip((cache.k, cache.v), want, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
            a.view(torch.int16).fill_(-1)  # as it was before


def test_appending_latents() -> None:
    scene = Scene(LATENT, {"latent": "bf16", "rope": "fp16"}, dtype=torch.bfloat16, **RAGGED)
    parts = scene.parts("latent", "rope")
    planes = [part.planes["data"].tensor[:, 0] for part in parts]
    want = [plane.clone() for plane in planes]
    x = scene.normal(5, 1, 48), scene.normal(5, 1, 16)
    indptr, indices = pages(scene)
    page._append_paged_mla_kv_cache_reference(
        *(t[:, 0] for t in x), *appended(scene), *want, indices, indptr, None
    )  # fmt: skip
    REFERENCE.write(parts, x, scene.step)
    for a, b in zip(planes, want, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_latents_in_fp8_with_a_scale_for_128_elements() -> None:
    scene = Scene(LatentKind(512, 64), {"latent": "fp8", "rope": "bf16"}, rows=(1, 1, 1), lengths=(16, 40, 8))
    latent, rope = scene.filled("latent", "rope")
    q = scene.normal(3, 4, 576)
    codes, scales = (latent.planes[name].tensor[:, 0] for name in ("data", "scale"))
    out = attention._mla_paged_decode_reference(
        q[..., :512], q[..., 512:], codes.view(torch.float8_e4m3fn), rope.planes["data"].tensor[:, 0], *pages(scene),
        576**-0.5, ckv_scale_arr=scales, kpe_scale=1.0,
    )  # fmt: skip
    got = out[0] if isinstance(out, tuple) else out
    assert (got.float() - ours(scene, (latent, rope), latent, 512, q)).abs().max() < 2e-2  # theirs is bf16


def test_prefill_of_latents() -> None:
    scene = Scene(LATENT, {"latent": "bf16", "rope": "fp16"}, **WHOLE)
    latent, rope = scene.filled("latent", "rope")
    q = scene.normal(13, 4, 64)
    planes = [part.planes["data"].tensor[:, 0] for part in (latent, rope)]
    got, _ = attention._mla_paged_prefill_reference(
        q[..., :48], q[..., 48:], *planes, scene.step.cu_seqlens, *pages(scene), 64**-0.5
    )
    assert (got.float() - ours(scene, (latent, rope), latent, 48, q)).abs().max() < 2e-2  # theirs is bf16


def test_trtllm_s_attention_to_latents() -> None:
    scene = Scene(LATENT, "bf16", rows=(1, 1, 1), lengths=(21, 40, 1))  # every row of theirs sees all tokens
    (latent,) = scene.filled("latent")
    q = scene.normal(3, 4, 64)
    tables = scene.step.groups[0]
    got = attention._trtllm_batch_decode_mla_reference(
        q, latent.planes["data"].tensor, None, 48, 48, 16, tables.block_table, tables.seq_lens, max(scene.lengths),
        bmm1_scale=64**-0.5, cum_seq_lens_q=scene.step.cu_seqlens,
    )  # fmt: skip
    assert (got - ours(scene, (latent,), latent, 48, q)).abs().max() < 1e-5


def test_sparse_latents() -> None:
    scene = Scene(LATENT, {"latent": "bf16", "rope": "fp16"}, rows=(1, 3), lengths=(21, 40))
    latent, rope = scene.filled("latent", "rope")
    q = scene.normal(4, 4, 64)
    slots = scene.all_slots()
    indices = torch.full((4, 9), -1)
    indices[0, :7] = slots[torch.randperm(21, generator=scene.random)[:7]]
    for row in (1, 2, 3):
        indices[row] = slots[21 + torch.randperm(37, generator=scene.random)[:9]]
    planes = [part.planes["data"].tensor[:, 0].contiguous() for part in (latent, rope)]
    got = attention._dsa_paged_reference(q[..., :48], q[..., 48:], *planes, indices, 64**-0.5)
    got = got[0] if isinstance(got, tuple) else got
    want = ours(scene, (latent, rope), latent, 48, q, indices=indices)
    assert (got.float() - want).abs().max() < 2e-2  # theirs is bf16


def indexed(codec: str) -> tuple[Scene, Any, torch.Tensor]:
    """Return a step of a row a sequence, its indexer keys, and their blocks as FlashInfer wants them.

    A block is all its codes, then all their scales.
    """
    scene = Scene((LATENT, INDEXER), {"latent": "bf16", "index": codec}, rows=(1, 1, 1), lengths=(21, 40, 17))
    (part,) = scene.filled("index")
    planes = [plane.tensor[:, 0].contiguous().view(torch.uint8).flatten(1) for plane in part.planes.values()]
    return scene, part, torch.cat(planes, 1).unflatten(1, (scene.tokens_per_block, 1, -1))


def best(logits: torch.Tensor, scene: Scene, count: int) -> list[set[int]]:
    return [{scene.slot(s, int(p)) for p in row.topk(count).indices} for s, row in enumerate(logits)]


def test_indexer_scores_of_fp8_keys() -> None:
    scene, part, fused = indexed("index-fp8")
    q, weights = scene.normal(3, 8, 128), torch.randn(3, 8, generator=scene.random)
    tables = scene.step.groups[0]
    logits = attn_scores._fp8_paged_mqa_logits_reference(
        q[:, None], fused, weights, tables.block_table, tables.seq_lens, max(scene.lengths)
    )
    got = torch.empty(3, 12, dtype=torch.int64)
    REFERENCE.score(q, weights, part, scene.step, FULL, got)
    assert [set(row) for row in got.tolist()] == best(logits, scene, 12)


def test_indexer_scores_of_fp4_keys() -> None:
    scene, part, fused = indexed("index-fp4")
    weights = torch.randn(3, 8, generator=scene.random)
    codes, exponents = attn_scores._per_token_cast_to_fp4(scene.normal(24, 128))
    q = attn_scores._cast_back_from_fp4(codes, exponents).view(3, 8, 128)
    tables = scene.step.groups[0]
    logits = attn_scores._fp4_paged_mqa_logits_reference(
        codes.view(3, 1, 8, 64), exponents.view(3, 1, 8), fused.view(torch.int8), weights, tables.block_table.long(),
        tables.seq_lens, max(scene.lengths), torch.float32,
    )  # fmt: skip
    got = torch.empty(3, 12, dtype=torch.int64)
    REFERENCE.score(q, weights, part, scene.step, FULL, got)
    assert [set(row) for row in got.tolist()] == best(logits, scene, 12)


def test_the_codes_of_fp4_indexer_keys() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    codes, exponents = attn_scores._per_token_cast_to_fp4(x)
    planes = CODECS["index-fp4"].encode(x[:, None], Vector((128,)), None)
    stored = unpack_e2m1(planes["data"][:, 0])
    assert torch.equal(torch.where(stored == 8, 0, stored), unpack_e2m1(codes.view(torch.uint8)))  # theirs has no -0
    assert torch.equal(planes["block_scale"][:, 0].view(torch.uint8), exponents.view(torch.uint8))


def test_the_codes_of_nvfp4() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    scale = float(x.abs().max()) / (448 * 6)
    codes, scales = quantize._nvfp4_kv_quantize_reference(x, torch.tensor([1 / scale]))
    planes = CODECS["nvfp4"].encode(x[:, None], Vector((128,)), scale)
    assert torch.equal(planes["data"][:, 0], codes)
    assert torch.equal(planes["block_scale"][:, 0].view(torch.uint8), scales.view(torch.uint8))
