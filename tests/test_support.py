"""The table of support agrees with what each backend does, and is where caches and `kvpool plan` ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvpool as kv
from kvpool import support
from kvpool.backends import BACKENDS
from kvpool.codecs import CODECS, Codec, PlaneSpec, Vector
from kvpool.kinds import FULL, IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime


def spec_of(*kinds: object, lifetime: Lifetime = FULL) -> kv.CacheSpec:
    return kv.CacheSpec((LayerSpec(kinds, lifetime),) * 2, "bf16", max_seq_len=4096)  # type: ignore[arg-type]


def test_every_backend_has_its_column() -> None:
    assert set(support.SUPPORT) == set(BACKENDS)


def test_the_native_codecs_are_those_of_the_header() -> None:
    types = (Path(__file__).resolve().parents[1] / "native" / "kernels" / "types.hpp").read_text()
    assert f"kMaxDim = {support.NATIVE_DIM};" in types
    assert f"kNumCodecs = {len(support.NATIVE_CODECS)};" in types


@pytest.mark.parametrize("codec", CODECS)
def test_flashinfer_s_column_is_what_its_export_takes(codec: str) -> None:
    from kvpool.backends.exports import paged_cache
    from kvpool.pools import Pools

    plan = kv.make_plan(spec_of(KVKind(2, 64)), codec=codec, num_blocks=2)
    pools = Pools(plan, "cpu")
    for constants in pools.constants.values():
        if constants.needs_scale:
            constants.set(scale=1.0)
    try:
        paged_cache(pools.part(0, "k"), pools.part(0, "v"))
    except kv.UnsupportedError:
        assert support.refusal("flashinfer", plan)
    else:
        assert not support.refusal("flashinfer", plan)


@pytest.mark.parametrize("codec", CODECS)
def test_flashinfer_s_latents_are_those_its_adapter_reads(codec: str) -> None:
    from kvpool.backends.flashinfer import latent_type
    from kvpool.pools import Pools

    for kind in (LatentKind(512, 64), LatentKind(256, 32)):
        try:
            plan = kv.make_plan(spec_of(kind), codec=codec, num_blocks=2)
        except kv.PlanError:
            continue  # no such cache
        taken = latent_type(Pools(plan, "cpu").part(0, "latent"))
        known = taken is not None and (taken.itemsize > 1 or kind.kv_lora_rank == 512)
        assert known == (not support.refusal("flashinfer", plan))


@pytest.mark.parametrize(
    ("kinds", "lifetime", "reason"),
    [
        ((LatentKind(256, 32),), FULL, r"latents of (512, 64) only"),
        ((KVKind(2, 64),), Lifetime(chunk=64), "chunked"),
        ((KVKind(2, 64),), Lifetime(window=64, sink_tokens=4), "sink tokens"),
        ((LatentKind(64, 32), IndexerKind(64)), FULL, "sparse slots"),
    ],
)
def test_flashinfer_s_column_names_what_it_has_no_kernel_for(
    kinds: tuple[object, ...], lifetime: Lifetime, reason: str
) -> None:
    codec = "fp8-tensor" if "latents" in reason else "bf16"
    plan = kv.make_plan(spec_of(*kinds, lifetime=lifetime), codec=codec, num_blocks=8)
    assert reason in support.refusal("flashinfer", plan)
    assert not any(support.refusal(name, plan) for name in ("reference", "cpu", "triton"))


class Alien(Codec):
    """fp32 under a name nobody has kernels for."""

    name = "alien"

    def planes(self, vector: Vector) -> tuple[PlaneSpec, ...]:
        return CODECS["fp32"].planes(vector)

    def encode(self, x, vector, scale=None, counts=None):  # type: ignore[no-untyped-def]
        return CODECS["fp32"].encode(x, vector)

    def decode(self, planes, vector, scale=None):  # type: ignore[no-untyped-def]
        return CODECS["fp32"].decode(planes, vector)


def test_a_cache_of_a_codec_without_kernels_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "alien", Alien())
    plan = kv.make_plan(spec_of(KVKind(2, 64)), codec="alien", num_blocks=2)
    with pytest.raises(kv.UnsupportedError, match=r"k\+v of layer 0 and 1 more: codec 'alien' has no native kernels"):
        kv.KVCache(plan, backend="cpu")
    assert "no Triton maths" in support.refusal("triton", plan)
    kv.KVCache(plan, backend="reference")


def test_native_kernels_refuse_vectors_that_are_too_long() -> None:
    plan = kv.make_plan(spec_of(KVKind(1, 2048)), num_blocks=2)
    with pytest.raises(kv.UnsupportedError, match="at most 1024 elements, not 2048"):
        kv.KVCache(plan, backend="cpu")


def test_the_rows_of_a_model_name_what_its_head_size_forbids() -> None:
    spec = spec_of(KVKind(4, 100))
    rows = {row.codec: row for row in support.rows(spec)}
    assert set(rows) == set(CODECS)
    assert "multiple of 16" in rows["nvfp4-token"].refused
    assert not rows["fp8"].refused
    text = support.text(spec)
    assert text.count("multiple of 16") >= 1
    assert "rotation not of k+v" in text
    assert "none of the families" in text


def test_a_family_s_rows_say_how_transformers_runs_it() -> None:
    spec = kv.CacheSpec.from_config(
        {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    )
    assert "transformers: gather (its attention is chosen when the model is built" in support.text(spec)


def test_the_table_needs_no_torch() -> None:
    code = (
        "import sys; from kvpool import support; from kvpool.spec import CacheSpec;"
        "print(support.text(CacheSpec.from_config({'model_type': 'llama', 'num_hidden_layers': 2, 'hidden_size': 64,"
        " 'num_attention_heads': 4}))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("support, for layouts HND, NHD\n")
