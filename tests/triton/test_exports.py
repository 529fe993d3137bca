"""Other libraries' shapes hold what ours hold; FlashInfer's own references say so, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scene import KV, LATENT, Scene

from kvpool.backends.base import Attention
from kvpool.backends.exports import (
    FLASHMLA_RECORD_BYTES,
    TRTLLM_UNUSED,
    combined_cache,
    flashmla_records,
    flashmla_schedule,
    paged_cache,
    swizzled_scales,
    trtllm_block_offsets,
    vllm_cache,
)
from kvpool.backends.flashinfer import FlashInferBackend, refusal
from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.errors import LayoutError, UnsupportedError
from kvpool.kinds import KVKind, LatentKind, Lifetime
from kvpool.layout import LAYOUTS

REFERENCE = ReferenceBackend()
ROOT = Path(__file__).parents[2]
#: What runs beside FlashInfer.
REFERENCES = Path(__file__).with_name("flashinfer_references.py")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["bf16", "fp8-tensor", "fp8", "nvfp4"])
def test_a_paged_cache_decodes_to_what_we_stored(codec: str, layout: str) -> None:
    scene = Scene(KVKind(3, 64), codec, layout)
    k, v = scene.filled("k", "v")
    cache = paged_cache(k, v)
    assert cache.layout == layout
    pages, n = k.planes["data"].tensor.shape[0], scene.tokens_per_block
    width = 32 if codec == "nvfp4" else 64
    assert cache.k.shape == ((pages, 3, n, width) if layout == "HND" else (pages, n, 3, width))
    assert cache.k.data_ptr() == k.planes["data"].address
    for part, data, scales, constant in (
        (k, cache.k, cache.k_scales, cache.k_scale),
        (v, cache.v, cache.v_scales, cache.v_scale),
    ):
        slots = scene.all_slots()
        page, inside = slots // n, slots % n
        pick = (page, slice(None), inside) if layout == "HND" else (page, inside)
        if codec == "nvfp4":
            from kvpool.codecs.floats import decode_e2m1, unpack_e2m1

            values = decode_e2m1(unpack_e2m1(data[pick]))
            assert scales is not None
            values = values * (scales[pick].float() * constant).repeat_interleave(16, -1)
        else:
            values = data[pick].float() * constant
            values = values if scales is None else values * scales[pick][..., None]
        want = torch.empty(len(slots), 3, 64)
        REFERENCE.read(part, slots, want)
        assert torch.equal(values, want)


@pytest.mark.parametrize("codec", ["int8", "fp32", "nvfp4-token"])
def test_what_flashinfer_does_not_know_is_refused_by_name(codec: str) -> None:
    k, v = Scene(KV, codec).parts("k", "v")
    with pytest.raises(UnsupportedError, match=f"no cache of codec '{codec}'"):
        paged_cache(k, v)


def test_a_plan_made_on_the_host_is_not_replayed() -> None:
    assert TritonBackend.replayable
    assert not FlashInferBackend.replayable


def test_options_flashinfer_does_not_know_are_refused_by_name() -> None:
    k, v = Scene(KV, "bf16").parts("k", "v")
    assert refusal((k,), v, Attention(1.0, Lifetime(window=8))) == ""
    assert "chunked" in refusal((k,), v, Attention(1.0, Lifetime(chunk=8)))
    assert "sink tokens" in refusal((k,), v, Attention(1.0, Lifetime(window=8, sink_tokens=2)))
    assert "sparse" in refusal((k,), v, Attention(1.0, indices=torch.zeros(1, 1)))
    assert "tree" in refusal((k,), v, Attention(1.0, tree=torch.zeros(1, 1)))
    assert refusal((k,), v, Attention(1.0, sinks=torch.zeros(4))) == ""
    (latent,) = Scene(LATENT, "fp8").parts("latent")
    assert "latents in fp8" in refusal((latent,), latent, Attention(1.0))
    (latent,) = Scene(LatentKind(512, 64), "fp8-tensor").parts("latent")
    assert refusal((latent,), latent, Attention(1.0)) == ""


def test_sinks_and_the_log_sum_exp_are_ours_whatever_flashinfer_s_wrapper_makes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its `fa2` kernels know no sinks, and its log-sum-exp is one of base 2."""
    scene = Scene(KV, "bf16")
    k, v = scene.filled("k", "v")
    scene.step.paged = lambda group: (torch.zeros(4, dtype=torch.int32),) * 3
    asked = Attention(64**-0.5, sinks=torch.tensor([-1.0, 0.0, 3.0, 90.0]))

    class Wrapper:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.plan = lambda *_, **__: None

        def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool, **scales: Any) -> Any:
            lse = torch.empty(out.shape[:2])
            REFERENCE.attend(q, (k,), v, 64, scene.step, Attention(asked.scale), out, lse)
            return (out, lse / np.log(2)) if return_lse else out

    utils = SimpleNamespace(get_compute_capability=lambda device: (9, 0))
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper, utils=utils)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    backend = FlashInferBackend("cpu")
    q = scene.normal(5, 4, 64)
    got, want = torch.empty(5, 4, 64), torch.empty(5, 4, 64)
    got_lse, want_lse = torch.empty(5, 4), torch.empty(5, 4)
    for options in (asked, Attention(asked.scale)):
        backend.attend(q, (k,), v, 64, scene.step, options, got, got_lse)
        REFERENCE.attend(q, (k,), v, 64, scene.step, options, want, want_lse)
        assert (got - want).abs().max() < 1e-5
        assert (got_lse - want_lse).abs().max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_s_tensor_holds_each_token_where_its_slot_mapping_says(layout: str) -> None:
    scene = Scene(KVKind(3, 64), "bf16", layout)
    k, v = scene.filled("k", "v")
    cache = vllm_cache(k, v)
    n = scene.tokens_per_block
    assert cache.shape[0] == 2
    assert cache.shape[2:] == (n, 3, 64)
    slots = scene.all_slots()
    for index, part in enumerate((k, v)):
        want = torch.empty(len(slots), 3, 64)
        REFERENCE.read(part, slots, want)
        assert torch.equal(cache[index, slots // n, slots % n].float(), want)


def test_two_pools_are_no_combined_cache() -> None:
    k, v = Scene(KVKind(2, 64, 32), "bf16").parts("k", "v")
    with pytest.raises(LayoutError, match="two pools"):
        combined_cache(k, v)


def test_a_flashmla_record_is_codes_then_scales_then_rope() -> None:
    scene = Scene(LatentKind(512, 64), {"latent": "fp8", "rope": "bf16"}, tokens_per_block=64)
    latent, rope = scene.filled("latent", "rope")
    blocks = torch.tensor([int(scene.table[1, 0]), int(scene.table[0, 0])])
    records = flashmla_records(latent, rope, blocks)
    assert records.shape == (2, 64, 1, FLASHMLA_RECORD_BYTES)
    record = records[0, 17, 0]
    slot = torch.tensor([scene.slot(1, 17)])
    want = torch.empty(1, 1, 512)
    REFERENCE.read(latent, slot, want)
    codes = record[:512].view(torch.float8_e4m3fn).float()
    scales = record[512:528].view(torch.float32)
    assert torch.equal(codes * scales.repeat_interleave(128), want[0, 0])
    want = torch.empty(1, 1, 64)
    REFERENCE.read(rope, slot, want)
    assert torch.equal(record[528:].view(torch.bfloat16).float(), want[0, 0])
    (other,) = Scene(LATENT, "fp8").parts("latent")
    with pytest.raises(UnsupportedError, match="latent of 512 in fp8"):
        flashmla_records(other, rope, blocks)


def test_swizzled_scales_put_four_tokens_of_a_scale_side_by_side() -> None:
    scales = torch.arange(2 * 1 * 8 * 4).reshape(2, 1, 8, 4)
    got = swizzled_scales(scales).reshape(2, 32)
    for t in range(8):
        for s in range(4):
            assert got[1, (t // 4) * 16 + s * 4 + t % 4] == scales[1, 0, t, s]
    with pytest.raises(UnsupportedError, match="multiple of 4 tokens"):
        swizzled_scales(scales[:, :, :6])


def test_a_flashmla_schedule_covers_every_block_once() -> None:
    random = np.random.default_rng(0)
    for lengths in ([1], [64, 64], [100000, 1, 1, 1], random.integers(0, 30000, 37).tolist()):
        seq_lens = np.array(lengths, np.int32)
        metadata, splits = flashmla_schedule(seq_lens, num_processors=132, num_q_heads=128)
        assert metadata.shape == (66, 8)
        covered = [np.zeros(max(-(-n // 64), 1), int) for n in lengths]
        seen = [set() for _ in lengths]
        for first, last, begin, end, split, was_split, ends_split, _ in metadata.tolist():
            for s in range(first, last + 1):
                start = begin if s == first else 0
                stop = end if s == last else len(covered[s])
                covered[s][start:stop] += 1
                seen[s].add(split if s == first else 0)
            assert not was_split or begin > 0
            assert not ends_split or end < len(covered[last])
        assert all((c == 1).all() for c in covered)
        assert splits[0] == 0
        assert np.diff(splits).tolist() == [len(x) for x in seen]


def test_trtllm_s_offsets_point_at_the_k_and_v_of_every_block() -> None:
    scene = Scene(KVKind(2, 64), "bf16")
    k, v = scene.filled("k", "v")
    group = scene.pools.plan.groups[0]
    pool = group.pools[0]
    table = np.where(scene.table >= 0, scene.table, -1)
    offsets = trtllm_block_offsets(table, pool, group.bytes_per_block)
    assert offsets.shape == (3, 2, table.shape[1])
    unit = pool.plane("data").strides[2]
    base = k.planes["data"].address
    for s, m in ((0, 2), (1, 4), (2, 0)):
        for index, part in enumerate((k, v)):
            want = part.planes["data"].tensor[int(table[s, m])].data_ptr()
            assert base + int(offsets[s, index, m]) * unit == want
    assert (offsets[2, :, 1:] == TRTLLM_UNUSED).all()
    scaled = Scene(KVKind(3, 48), "fp8").pools.plan.groups[0]
    with pytest.raises(LayoutError, match="whole units"):
        trtllm_block_offsets(table, scaled.pools[0], scaled.bytes_per_block)


@pytest.mark.long
def test_flashinfer_s_references_read_and_write_our_caches_as_we_do() -> None:
    """They are torch and need no GPU; its wheel is in a folder of its own, as no package of ours needs it."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import peer

    try:
        folder = peer.install()
    except OSError as error:
        pytest.skip(str(error))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(REFERENCES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert not done.returncode, done.stdout[-2000:]
