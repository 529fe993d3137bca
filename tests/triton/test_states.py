"""Recurrent states that kernels store, read, copy and swap are those of the reference, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpool as kv
from kvpool import support
from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.codecs import CODECS
from kvpool.kinds import KVKind, LayerSpec, StateKind
from kvpool.pools import Part, Pools

#: The interpreter computes with NumPy, which warns of what NaN and infinity do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
#: Shapes of a convolution, whose rows are short, of a scan, and of one that nothing divides.
SHAPES = {"conv": (48, 3), "ssm": (3, 4, 64), "odd": (5, 7)}
SLOTS = torch.tensor([4, 0, -1, 6, 2], dtype=torch.int32)


def planned(kind: StateKind, codec: str, **options: Any) -> kv.Plan:
    attention = LayerSpec((KVKind(2, 16),))
    spec = kv.CacheSpec((attention, LayerSpec((kind,)), LayerSpec((kind,))), max_seq_len=512)
    codecs = {"*": "bf16", kind.name: codec}
    return kv.make_plan(spec, codec=codecs, num_blocks={"full": 32, "state": 12}, tokens_per_block=4, **options)


def opened(plan: kv.Plan) -> tuple[Pools, Part]:
    """Poisoned pools, and the state of the second layer that has one."""
    pools = Pools(plan)
    (group,) = (g for g, found in enumerate(plan.groups) if found.is_state)
    part = pools.part(2, plan.groups[group].pools[0].parts[0])
    for plane in part.planes.values():
        plane.tensor[:12].view(torch.uint8).fill_(0xFF)
    if part.codec.constant_scale:
        part.constants.set(scale=0.02)
    return pools, part


def states(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(len(SLOTS), *shape, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0
    x[1, 1] *= 1e-30
    x[3, 1] *= 1e30
    x[3, -1, ..., -1] = float("inf")
    x[4, -1, ..., -1] = float("nan")
    return x.to(dtype).view(len(SLOTS), -1)


@pytest.mark.parametrize("codec", [name for name in CODECS if not name.startswith("index")])
@pytest.mark.parametrize("name", SHAPES)
def test_every_codec_stores_and_reads_states_to_the_bit(codec: str, name: str) -> None:
    try:
        plan = planned(StateKind(name, SHAPES[name]), codec)
    except kv.PlanError:
        pytest.skip("the codec cannot store rows of this length")
    if support.refusal("triton", plan):
        assert codec == "nvfp4-token"
        pytest.skip(support.refusal("triton", plan))
    for dtype in (torch.float32, torch.bfloat16):
        x = states(SHAPES[name], dtype)
        (_, want), (_, got) = opened(plan), opened(plan)
        reference, backend = ReferenceBackend(), TritonBackend("cpu")
        reference.write_states(want, SLOTS, x)
        backend.write_states(got, SLOTS, x)
        for plane in want.planes:
            a, b = want.planes[plane].tensor[:12], got.planes[plane].tensor[:12]
            if want.codec.quantised:
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), plane
            else:  # NaN has many bit patterns there
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), plane
        assert backend.counts(got) == reference.counts(want)
        a, b = reference.read_states(want, SLOTS), backend.read_states(got, SLOTS)
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        assert (b[2] == 0).all()


def test_a_scale_of_all_rows_is_refused_by_name() -> None:
    plan = planned(StateKind("ssm", (4, 64)), "nvfp4-token")
    assert "one scale for the 4 rows of a state" in support.refusal("triton", plan)
    assert "one scale for the 4 rows of a state" in support.refusal("flashinfer", plan)
    assert not support.refusal("reference", plan)
    with pytest.raises(kv.UnsupportedError, match="4 rows of state 'ssm'"):
        TritonBackend("cpu").read_states(opened(plan)[1], SLOTS)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_copies_of_states_are_those_of_the_reference(codec: str) -> None:
    plan = planned(StateKind("ssm", (3, 4, 64)), codec)
    pairs = [(3, 5), (5, 1), (2, 3), (0, 7), (0, 2)]
    copied = []
    for backend in (ReferenceBackend(), TritonBackend("cpu")):
        pools, _ = opened(plan)
        pieces = [piece for block in range(12) for piece in pools.slabs[1].block_bytes(block)]
        random = torch.Generator().manual_seed(1)
        for piece in pieces:
            piece.copy_(torch.randint(0, 256, piece.shape, dtype=torch.uint8, generator=random))
        backend.copy(pools, 1, pairs)
        copied.append(torch.cat(pieces))
    assert len(pieces) == 24  # two layers
    assert torch.equal(*copied)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_forks_checkpoints_and_failed_steps_keep_the_states_of_the_reference(codec: str) -> None:
    plan = planned(StateKind("ssm", (4, 32)), codec, checkpoint_interval=8)
    runs = [run(kv.KVCache(plan, backend="reference")), run(interpreted(plan))]
    assert len(runs[0]) == len(runs[1]) == 16
    for want, got in zip(*runs, strict=True):
        assert torch.equal(want, got)


def interpreted(plan: kv.Plan) -> kv.KVCache:
    """A cache whose kernels are interpreted, which no user can ask for."""
    cache = kv.KVCache(plan, backend="reference")
    backend = TritonBackend("cpu")
    for buffers in cache._buffers:
        backend.prepare(cache.pools, buffers)
    cache.backend = backend
    return cache


def run(cache: kv.KVCache) -> list[torch.Tensor]:
    """Return the states that steps start from: prefill, decode, a failed step, a fork, a match of a checkpoint."""
    random = torch.Generator().manual_seed(2)
    seen: list[torch.Tensor] = []

    def step(*sequences: kv.Sequence, fail: bool = False) -> None:
        try:
            with cache.step([(s, 8) for s in sequences]) as opened:
                for layer in (1, 2):
                    seen.append(cache.state_read(layer, opened, "ssm"))
                    drawn = torch.randn(opened.num_sequences, 4, 32, generator=random)
                    cache.state_write(layer, opened, "ssm", seen[-1] * 0.5 + drawn)
                t = opened.total_tokens
                cache.write(0, opened, torch.zeros(t, 2, 16), torch.zeros(t, 2, 16))
                if fail:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    first = cache.sequence(list(range(20)))
    for _ in range(3):
        step(first)
    first.extend([90])
    step(first, fail=True)
    step(first)
    fork = first.fork()
    for token in (91, 92):
        first.extend([token])
        fork.extend([token + 10])
        step(first, fork)
    first.release()
    again = cache.sequence([*range(20), 7, 8, 9])
    step(again)
    assert again.num_cached_tokens >= 8
    cache.check()
    assert any(state.any() for state in seen)
    return seen
