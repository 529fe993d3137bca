"""A padded step that was recorded once serves every later step of its size: nothing but contents may differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from host_device import HostRecorder
from kvpool.backends.base import Attention
from kvpool.backends.reference import ReferenceBackend
from kvpool.backends.triton import TritonBackend
from kvpool.engine.graphs import DecodeGraphs, sizes_up_to
from kvpool.errors import KVError
from kvpool.kinds import FULL, KVKind, LayerSpec, Lifetime, StateKind
from kvpool.plan import Plan, make_plan
from kvpool.pools import Pools
from kvpool.spec import CacheSpec
from kvpool.step import Step, StepBuffers

Q, D, N = 4, 32, 8


def plan_for(lifetime: Lifetime) -> Plan:
    spec = CacheSpec(layers=(LayerSpec((KVKind(2, D),), lifetime),), max_seq_len=512)
    return make_plan(
        spec, 1 << 20, codec="fp8", tokens_per_block=N, max_sequences=8, max_step_tokens=16, max_seq_len=256
    )


def fill(buffers: StepBuffers, lengths: list[int], seed: int) -> Any:
    """Put a decode step of sequences of these lengths into the arrays, over blocks in random order."""
    random = np.random.default_rng(seed)
    ids = random.permutation(150).tolist()
    a, g = buffers.arrays, buffers.arrays.groups[0]
    g.block_table.fill(-1)
    for s, n in enumerate(lengths):
        for m in range(-(-n // N)):
            g.block_table[s, m] = ids.pop()
        a.num_tokens[s], g.seq_lens[s], a.last_rows[s], a.cu_seqlens[s + 1] = 1, n, s, s + 1
        a.token_ids[s] = random.integers(1000)
        g.slots[s] = g.block_table[s, (n - 1) // N] * N + (n - 1) % N
    return SimpleNamespace(sequences=tuple(range(len(lengths))), total_tokens=len(lengths), num_samples=len(lengths))


@pytest.mark.parametrize("lifetime", [FULL, Lifetime(window=40, sink_tokens=3)], ids=lambda x: x.name)
def test_a_recorded_step_answers_for_any_contents_of_its_size(lifetime: Lifetime) -> None:
    plan = plan_for(lifetime)
    pools = Pools(plan)
    pools.slabs[0].bytes[: pools.slabs[0].committed_bytes].fill_(0x7F)  # NaN
    first = StepBuffers(plan, staged=True)
    buffers = (first, StepBuffers(plan, staged=True, share=first))
    backend, reference = TritonBackend("cpu"), ReferenceBackend()
    for b in buffers:
        backend.prepare(pools, b)
    k, v = pools.part(0, "k"), pools.part(0, "v")
    embedding = torch.randn(1000, 6, Q, D, generator=torch.Generator().manual_seed(0))
    x = torch.empty(6, 3, Q, D)
    out = torch.empty(6, Q, D)
    options = Attention(D**-0.5, lifetime)

    def forward(step: Step) -> torch.Tensor:
        backend.write((k, v), (x[: step.total_tokens, 1, :2], x[: step.total_tokens, 2, :2]), step)
        backend.attend(x[: step.total_tokens, 0], (k,), v, D, step, options, out[: step.total_tokens], None)
        return out[: step.total_tokens]

    recorder = HostRecorder()
    graphs = DecodeGraphs(forward, 8, recorder)
    cases = [[9, 1, 40, 17], [200, 3, 8, 130], [1, 1], [64, 65, 130], [5, 250, 33, 16]]
    for turn, lengths in enumerate(cases):
        b = buffers[turn % 2]
        decision = fill(b, lengths, seed=turn)
        # Everything before this step's token was stored earlier.
        for s, n in enumerate(lengths):
            slots = torch.tensor([int(b.arrays.groups[0].block_table[s, p // N]) * N + p % N for p in range(n - 1)])
            for part in (k, v) if n > 1 else ():
                vectors = torch.randn(n - 1, 2, D)
                for name, values in part.codec.encode(vectors, part.vector).items():
                    part.planes[name].tensor[slots // N, :, slots % N] = values
        pad = graphs.pad_to([1] * len(lengths))
        assert pad is not None
        step = Step(b, decision, lambda *_: None, pad).start()
        backend.begin(step)
        rows = step.token_ids[: len(lengths)]
        x[: len(lengths)] = torch.stack([embedding[rows, 0], embedding[rows, 1], embedding[rows, 2]], 1)
        x[len(lengths) :] = float("nan")
        got = graphs.forward(step)[: len(lengths)].clone()
        want = torch.empty(step.total_tokens, Q, D)
        reference.attend(x[: step.total_tokens, 0], (k,), v, D, step, options, want, None)
        assert (got - want[: len(lengths)]).abs().max() < 1e-5, f"step {turn}"
        step.close()
    assert recorder.num_replays == len(cases) - 2
    assert set(graphs._recordings) == {4, 2}
    assert step.buffers.root is first


def test_a_recorded_step_takes_every_sequence_s_state_on_whatever_slots_it_has() -> None:
    """Its state moves from the slot it is read from to the one it is written to; padded rows have none."""
    spec = CacheSpec((LayerSpec((StateKind("ssm", (4, 32)),)),), max_seq_len=512)
    plan = make_plan(spec, codec={"ssm": "int8"}, num_blocks=24, max_sequences=8, max_step_tokens=16)
    pools, backend = Pools(plan), TritonBackend("cpu")
    buffers = StepBuffers(plan, staged=True)
    backend.prepare(pools, buffers)
    part = pools.part(0, "ssm")

    def forward(step: Step) -> torch.Tensor:
        states = backend.read_states(part, step.groups[0].read_slots)
        backend.write_states(part, step.groups[0].write_slots, states)
        return states

    graphs = DecodeGraphs(forward, 8, HostRecorder())
    random = torch.Generator().manual_seed(0)
    for count in (3, 4, 3):
        slots = torch.randperm(24, generator=random)[: 2 * count].int()
        before = torch.randn(count, 128, generator=random)
        backend.write_states(part, slots[:count], before)
        want = backend.read_states(part, slots[:count])
        a, g = buffers.arrays, buffers.arrays.groups[0]
        a.num_tokens[:count], a.cu_seqlens[1 : count + 1] = 1, range(1, count + 1)
        g.read_slots[:count], g.write_slots[:count] = slots[:count], slots[count:]
        decision = SimpleNamespace(sequences=tuple(range(count)), total_tokens=count, num_samples=count)
        step = Step(buffers, decision, lambda *_: None, graphs.pad_to([1] * count)).start()
        got = graphs.forward(step).clone()
        assert torch.equal(got[:count], want)
        assert torch.equal(backend.read_states(part, slots[count:]), want)
        step.close()
    assert set(graphs._recordings) == {4}


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * x[0].item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
    ids=["a number read", "a mask", "a number brought"],
)
def test_a_pass_that_makes_the_host_wait_is_not_recorded(forward: Any) -> None:
    with pytest.raises(AssertionError, match="makes the host wait"):
        HostRecorder().record(lambda: forward(torch.ones(2)))


def test_a_recorded_pass_finds_new_contents_at_the_old_addresses() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    recording = HostRecorder().record(lambda: total.add_(x[1:].sum() * x).clone() + 1)
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert recording.replay().tolist() == [2 + 5 + 1, 2 + 10 + 1, 2 + 15 + 1]


def test_steps_that_are_no_decode_steps_are_not_padded() -> None:
    graphs = DecodeGraphs(lambda step: torch.empty(0), 20, HostRecorder())
    assert graphs.sizes == (1, 2, 4, 8, 12, 16, 20)
    assert graphs.pad_to([1] * 9) == (12, 12)
    assert graphs.pad_to([1, 2]) is None
    assert graphs.pad_to([1] * 21) is None
    assert graphs.pad_to([]) is None
    assert sizes_up_to(1) == (1,)


def test_padding_that_does_not_fit_is_refused_with_the_numbers() -> None:
    buffers = StepBuffers(plan_for(FULL), staged=True)
    decision = fill(buffers, [3, 4, 5], 0)
    for bad in ((2, 3), (3, 2), (9, 9), (3, 17)):
        with pytest.raises(KVError, match=r"3 sequences and 3 tokens, and fit the plan's 8 and 16"):
            Step(buffers, decision, lambda *_: None, bad)


def test_padded_rows_write_nothing_and_see_nothing() -> None:
    buffers = StepBuffers(plan_for(FULL), staged=True)
    fill(buffers, [30, 40, 50, 60], 0)
    buffers.arrays.groups[0].slots[:] = 7
    decision = fill(buffers, [3, 4], 1)
    step = Step(buffers, decision, lambda *_: None, (4, 6)).start()
    tables = step.groups[0]
    assert tables.slots.tolist()[2:] == [-1] * 4
    assert tables.seq_lens.tolist() == [3, 4, 0, 0]
    assert (tables.block_table[2:] == -1).all()
    assert step.cu_seqlens.tolist() == [0, 1, 2, 2, 2]
    assert step.last_rows.tolist() == [0, 1, 0, 0]
    indptr, indices, last = step.paged()
    assert indptr.tolist() == [0, 1, 2, 2, 2]
    assert indices.tolist() == tables.block_table[:2, 0].tolist()
    assert last.tolist() == [3, 4, 0, 0]
