"""What holds for every plan: hypothesis draws models, formats and budgets."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from kvpool.errors import PlanError, SpecError, UnsupportedError
from kvpool.kinds import FULL, IndexerKind, Kind, KVKind, LatentKind, LayerSpec, Lifetime, SharedKind, StateKind
from kvpool.layout import LAYOUTS
from kvpool.plan import GroupPlan, Plan, make_plan
from kvpool.plan.sizing import live_blocks
from kvpool.spec import CacheSpec

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)

dims = st.sampled_from([16, 32, 64, 80, 128])
lifetimes = st.sampled_from([FULL, FULL, Lifetime(window=100), Lifetime(window=64, sink_tokens=3), Lifetime(chunk=96)])


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    """A model of a few layers of any kind, some shared, at least one that stores something."""
    out: list[LayerSpec] = []
    for index in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["kv", "kv", "latent", "state", "both", "none", "shared"]))
        sources = [i for i, layer in enumerate(out) if layer.kinds and not isinstance(layer.kinds[0], SharedKind)]
        kv = KVKind(draw(st.sampled_from([1, 2, 3, 4])), draw(dims), draw(dims))
        conv = StateKind("conv", (draw(st.sampled_from([8, 24])), 3), "bf16")
        ssm = StateKind("ssm", (4, draw(st.sampled_from([4, 6])), 8), "fp32", ((4, 1),))
        if kind == "shared" and sources:
            source = draw(st.sampled_from(sources))
            out.append(LayerSpec((SharedKind(source),), out[source].lifetime))
        elif kind == "latent":
            indexer = (IndexerKind(128),) if draw(st.booleans()) else ()
            out.append(LayerSpec((LatentKind(draw(st.sampled_from([128, 192])), 64), *indexer), draw(lifetimes)))
        elif kind == "state":
            out.append(LayerSpec((conv, ssm) if draw(st.booleans()) else (ssm,)))
        elif kind == "both":
            out.append(LayerSpec((kv, conv, ssm), draw(lifetimes)))
        elif kind == "none" and index:
            out.append(LayerSpec())
        else:
            out.append(LayerSpec((kv,), draw(lifetimes)))
    return tuple(out)


@st.composite
def plans(draw: st.DrawFn, *, small: bool = False) -> Plan:
    """A plan of such a model, with any format, layout, block size and budget."""
    spec = CacheSpec(draw(layers()), max_seq_len=draw(st.sampled_from([64, 500, 4096])))
    codec: Any = draw(st.sampled_from(["bf16", "fp32", "fp8", "int8", "nvfp4", "nvfp4-token"]))
    if draw(st.booleans()):
        codec = {"*": codec, "v": draw(st.sampled_from(["bf16", "fp8"])), "layers": {0: "fp16"}, "rope": "bf16"}
    tokens = draw(st.sampled_from([2, 4] if small else [2, 16, 32, 128]))
    arguments: dict[str, Any] = {
        "codec": codec,
        "layout": draw(st.sampled_from(sorted(LAYOUTS))),
        "layer_first": draw(st.booleans()),
        "tokens_per_block": tokens,
        "num_draft": draw(st.integers(0, 2)),
        "max_sequences": draw(st.integers(1, 100)),
        "checkpoint_interval": draw(st.sampled_from([64, 1024])),
        "device": draw(st.sampled_from(["cpu", "cuda"])),
    }
    note(f"{spec.layers} {arguments}")
    if small:
        return make_plan(spec, num_blocks=2, **arguments)
    budget = draw(st.integers(1, 2**34))
    try:
        plan = make_plan(spec, budget, **arguments)
    except PlanError as error:
        least = int(str(error).split("give at least ")[1].split()[0])
        assert budget < least
        budget = least + draw(st.integers(0, 2**28))
        plan = make_plan(spec, budget, **arguments)
    note(f"budget {budget}")
    return plan


@given(plans())
@QUICK
def test_committed_bytes_stay_within_the_budget_and_one_more_block_would_not_fit(plan: Plan) -> None:
    committed = [g.committed_bytes(g.num_blocks, plan.granule_bytes) for g in plan.groups]
    assert plan.used_bytes == sum(committed) <= plan.budget_bytes
    assert plan.left_over_bytes == plan.budget_bytes - plan.used_bytes
    for group, used in zip(plan.groups, committed, strict=True):
        assert 1 <= group.num_blocks <= group.num_blocks_reserved
        more = group.committed_bytes(group.num_blocks + 1, plan.granule_bytes)
        assert plan.used_bytes - used + more > plan.budget_bytes


@given(plans())
@QUICK
def test_planes_of_a_block_do_not_overlap_and_stay_inside_it(plan: Plan) -> None:
    for group in plan.groups:
        pieces = sorted(group.pieces(0))
        used: list[tuple[int, int]] = []
        for pool in group.pools:
            for plane in pool.planes:
                assert plane.strides[0] in {r.row_bytes for r in group.ranges}
                size = plane.bytes_per_block // len(pool.layers)
                used += [(plane.offset + i * plane.strides[1], size) for i in range(len(pool.layers))]
                assert plane.offset % 128 == 0
        used.sort()
        for (start, size), (following, _) in itertools.pairwise(used):
            assert start + size <= following
        for start, size in used:
            assert any(at <= start and start + size <= at + length for at, length in pieces)
        assert sum(size for _, size in used) == group.payload_bytes_per_block
        assert sum(size for _, size in pieces) == group.bytes_per_block
        assert group.bytes_per_block % 256 == 0


def containers(group: GroupPlan) -> list[range]:
    """Byte ranges of every container of a group's first two blocks."""
    found = []
    for pool in group.pools:
        for plane in pool.planes:
            shape = (2, *plane.shape[1:])
            width = plane.bytes_per_block // (len(pool.layers) * pool.kv_factor * pool.num_heads * plane.shape[4])
            width //= plane.shape[5] if len(plane.shape) == 6 else 1
            for index in itertools.product(*(range(n) for n in shape[:5])):
                start = plane.offset + sum(i * s for i, s in zip(index, plane.strides[:5], strict=True))
                count = plane.shape[5] if len(plane.shape) == 6 else 1
                assert len(plane.shape) == 5 or plane.strides[5] == width
                found.append(range(start, start + count * width))
    return found


@given(plans(small=True))
@QUICK
def test_no_two_elements_share_a_byte(plan: Plan) -> None:
    for group in plan.groups:
        vectors = sorted(containers(group), key=lambda r: r.start)
        for one, other in itertools.pairwise(vectors):
            assert one.stop <= other.start
        assert vectors[-1].stop <= group.slab_bytes


@given(plans())
@QUICK
def test_a_plan_survives_json_and_keeps_its_fingerprint(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.fingerprint, again.block_format) == (plan.fingerprint, plan.block_format)


@given(plans(), st.integers(1, 5000))
@QUICK
def test_sequences_that_fit_do_fit_and_one_more_would_not(plan: Plan, length: int) -> None:
    found = plan.sequences(length)
    for group in plan.groups:
        assert live_blocks(group, {length: found.value}, plan.load) <= group.num_blocks
    (limit,) = (g for g in plan.groups if g.name == found.limited_by)
    assert live_blocks(limit, {length: found.value + 1}, plan.load) > limit.num_blocks
    batch = max(found.value, 1)
    longest = plan.longest_sequence(batch).value
    if found.value:
        assert longest >= min(length, plan.max_seq_len)
    assert str(plan).startswith("unnamed") or str(plan)


@given(layers(), st.sampled_from([1, 2, 4]))
@QUICK
def test_tensor_parallel_ranks_add_up_to_the_whole(model: tuple[LayerSpec, ...], size: int) -> None:
    def divisible(kind: Kind) -> Kind:
        return KVKind(4, kind.head_dim, kind.v_head_dim) if isinstance(kind, KVKind) else kind

    model = tuple(LayerSpec(tuple(map(divisible, layer.kinds)), layer.lifetime) for layer in model)
    spec = CacheSpec(model, max_seq_len=4096)
    whole = make_plan(spec, num_blocks=1)
    ranks = [make_plan(spec, num_blocks=1, tp_size=size, tp_rank=rank) for rank in range(size)]
    for index, group in enumerate(whole.groups):
        for at, pool in enumerate(group.pools):
            elements = sum(r.groups[index].pools[at].num_heads * r.groups[index].pools[at].vector.dim for r in ranks)
            mine = pool.num_heads * pool.vector.dim
            split = isinstance(pool.kind, KVKind) or (isinstance(pool.kind, StateKind) and bool(pool.kind.heads))
            assert elements == mine * (1 if split else size)


@given(st.dictionaries(st.text(max_size=12), st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()))))
@settings(max_examples=60, deadline=None)
def test_any_json_object_gives_a_spec_or_a_reason(found: dict[str, Any]) -> None:
    for base in ({}, {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}):
        with suppress(SpecError, UnsupportedError):
            CacheSpec.from_config({**base, **found})


FIELDS = """
    num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim sliding_window layer_types
    kv_lora_rank qk_rope_head_dim index_head_dim attention_chunk_size block_configs linear_attn_config
    text_config attn_config per_layer_config mamba_d_state mamba_num_heads conv_kernel attn_type_list
    hybrid_override_pattern attention_types model_type torch_dtype quantization_config num_kv_shared_layers
    max_position_embeddings sliding_window_pattern
""".split()  # noqa: SIM905
scalars = [
    st.none(),
    st.booleans(),
    st.integers(-5, 10**9),
    st.floats(),
    st.sampled_from(["gemma2", "mamba", "x", "M*"]),
]
odd = st.recursive(
    st.one_of(scalars),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(FIELDS), odd, max_size=6))
@settings(max_examples=150, deadline=None)
def test_known_fields_of_any_type_give_a_spec_or_a_reason(found: dict[str, Any]) -> None:
    base = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    with suppress(SpecError, UnsupportedError):
        CacheSpec.from_config({**base, **found})
