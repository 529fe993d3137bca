"""Codecs by part and layer, and the pools they make."""

from __future__ import annotations

from kvpool.kinds import IndexerKind, LatentKind, LayerSpec, StateKind
from kvpool.plan import Plan, make_plan
from kvpool.spec import CacheSpec
from model_data import HYBRID, uniform


def codec_of(plan: Plan, layer: int, part: str) -> str:
    return plan.find(layer, part)[1].codec


def test_a_plain_name_covers_k_v_and_latents_and_leaves_indexers_and_states() -> None:
    spec = CacheSpec((LayerSpec((LatentKind(512, 64), IndexerKind(128))), *HYBRID.layers), max_seq_len=4096)
    plan = make_plan(spec, "1GiB", codec="fp8")
    found = [codec_of(plan, *x) for x in ((0, "latent"), (0, "index"), (1, "k"), (3, "conv"), (3, "ssm"))]
    assert found == ["fp8", "index-fp8", "fp8", "bf16", "fp32"]


def test_parts_and_layers_may_have_codecs_of_their_own() -> None:
    plan = make_plan(
        uniform(layers=4), "1GiB", codec={"k": "fp8", "v": "nvfp4", "layers": {0: "bf16", -1: {"v": "int8"}}}
    )
    assert [codec_of(plan, i, "k") for i in range(4)] == ["bf16", "fp8", "fp8", "fp8"]
    assert [codec_of(plan, i, "v") for i in range(4)] == ["bf16", "nvfp4", "nvfp4", "int8"]
    (group,) = plan.groups
    assert group.layers == (0, 1, 2, 3)


def test_a_latent_splits_into_two_pools_when_its_rope_part_has_another_codec() -> None:
    spec = uniform(LatentKind(512, 64))
    whole = make_plan(spec, "1GiB", codec={"latent": "fp8"})
    assert [pool.parts for pool in whole.groups[0].pools] == [("latent",)]
    assert whole.groups[0].pools[0].vector.segments == (128, 128, 128, 128, 64)
    split = make_plan(spec, "1GiB", codec={"latent": "fp8", "rope": "bf16"})
    assert [(pool.parts, pool.vector.dim) for pool in split.groups[0].pools] == [(("latent",), 512), (("rope",), 64)]


def test_naming_a_part_the_model_lacks_is_noted() -> None:
    plan = make_plan(uniform(), "1GiB", codec={"*": "fp8", "ssm": "bf16"})
    assert any("stores no ssm" in note for note in plan.notes)


def test_layer_first_groups_with_several_sets_of_layers_have_a_range_for_each() -> None:
    mixed = CacheSpec((*HYBRID.layers, LayerSpec((StateKind("ssm", (2, 8), "fp32"),))), max_seq_len=4096)
    plan = make_plan(mixed, "64MiB")
    state = plan.groups[-1]
    assert state.layer_first
    assert len(state.ranges) == 2
    pieces = state.pieces(3)
    assert len(pieces) == 2
    assert sum(size for _, size in pieces) == state.bytes_per_block
    assert state.committed_bytes(5, 4096) == sum(-(-r.row_bytes * 5 // 4096) * 4096 * r.num_rows for r in state.ranges)
