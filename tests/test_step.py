"""A step's tensors: addresses that never change, contents that follow the sequences, an end exactly once."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import kvpool as kv
from kvpool.kinds import KVKind, LayerSpec


def small_cache(**settings) -> kv.KVCache:
    spec = kv.CacheSpec(tuple(LayerSpec((KVKind(2, 32),)) for _ in range(2)), dtype="fp32", max_seq_len=512)
    plan = kv.make_plan(
        spec, **{"num_blocks": 128, "tokens_per_block": 8, "max_sequences": 8, "max_step_tokens": 256, **settings}
    )
    return kv.KVCache(plan)


def tensors_of(step: kv.Step) -> dict[str, torch.Tensor]:
    named = {
        name: getattr(step, name)
        for name in ("token_ids", "positions", "cu_seqlens", "num_tokens", "last_rows", "sample_seqs")
    }
    for index, group in enumerate(step.groups):
        for name in ("slots", "block_table", "seq_lens"):
            named[f"{index}.{name}"] = getattr(group, name)
    return named


def test_every_step_tensor_keeps_its_address_over_a_hundred_steps():
    cache = small_cache()
    sequences = [cache.sequence([i] * (3 * i + 1)) for i in range(5)]
    addresses: dict[str, set[int]] = {}
    for _ in range(100):
        with cache.step([(seq, 100) for seq in sequences]) as step:
            for name, tensor in tensors_of(step).items():
                addresses.setdefault(name, set()).add(tensor.data_ptr())
        cache.extend(step, [7] * step.num_samples)
    assert {name: len(seen) for name, seen in addresses.items()} == dict.fromkeys(addresses, 2)  # two that rotate


def test_python_work_of_a_step_does_not_grow_with_its_tokens():
    """Counts Python function calls and lines, which do not depend on the machine's mood."""

    def work(num_tokens: int) -> int:
        cache = small_cache(max_step_tokens=4096, max_seq_len=4096, num_blocks=1024)
        sequence = cache.sequence(list(range(num_tokens)))
        events = 0

        def count(frame, event, argument):
            nonlocal events
            events += 1
            return count

        gc.collect()
        gc.disable()  # finalisers of other tests' objects are no work of this step
        sys.settrace(count)
        try:
            with cache.step([(sequence, num_tokens)]) as step:
                assert step.groups
        finally:
            sys.settrace(None)
            gc.enable()
        assert step.total_tokens == num_tokens
        return events

    assert work(16) == work(4000)


def test_rows_and_slots_say_where_every_token_goes():
    cache = small_cache()
    a, b = cache.sequence(list(range(20))), cache.sequence([9, 9, 9])
    with cache.step([(a, 12), (b, 100)]) as step:
        assert step.token_ids.tolist() == [*range(12), 9, 9, 9]
        assert step.positions.tolist() == [*range(12), 0, 1, 2]
        assert step.cu_seqlens.tolist() == [0, 12, 15]
        assert step.num_tokens.tolist() == [12, 3]
        assert (step.last_rows.tolist(), step.sample_seqs.tolist()) == ([14], [1])
        tables = step.groups[0]
        assert tables.seq_lens.tolist() == [12, 3]
        for s, (first, last) in enumerate([(0, 12), (12, 15)]):
            for row in range(first, last):
                position = step.positions[row]
                assert tables.slots[row] == tables.block_table[s, position // 8] * 8 + position % 8
        assert (tables.block_table[1, 1:] == -1).all()


def test_padding_writes_nothing_and_reads_nothing():
    cache = small_cache()
    with cache.step([(cache.sequence([1, 2, 3]), 10)]) as step:
        arrays = step.buffers.arrays
        assert (arrays.groups[0].slots[3:] == -1).all()
        assert (arrays.groups[0].seq_lens[1:] == 0).all()


def test_flashinfer_gets_its_page_table():
    cache = small_cache()
    a, b = cache.sequence(list(range(20))), cache.sequence(list(range(100, 108)))
    with cache.step([(a, 100), (b, 100)]) as step:
        indptr, indices, last = step.paged()
        table = step.groups[0].block_table
        assert indptr.tolist() == [0, 3, 4]
        assert indices.tolist() == [*table[0, :3].tolist(), int(table[1, 0])]
        assert last.tolist() == [4, 8]


def test_a_step_ends_exactly_once():
    cache = small_cache()
    sequence = cache.sequence([1, 2, 3])
    with cache.step([(sequence, 10)]) as step:
        pass
    with pytest.raises(kv.KVError, match="ended already"):
        step.close()
    with pytest.raises(kv.LayoutError, match="open step"):
        cache.write(0, step, torch.zeros(3, 2, 32), torch.zeros(3, 2, 32))


def test_a_failed_step_leaves_every_sequence_as_it_was():
    cache = small_cache()
    sequence = cache.sequence(list(range(20)))
    before = cache.stats()
    with pytest.raises(ZeroDivisionError), cache.step([(sequence, 20)]):
        raise ZeroDivisionError
    assert sequence.num_computed_tokens == 0
    assert cache.stats().free == before.free
    cache.check()


def test_a_prompt_that_can_never_fit_fails_at_once_with_the_numbers():
    cache = small_cache(num_blocks=4)
    with pytest.raises(kv.OutOfBlocks, match=r"(?s)40.*5.*4"):
        cache.sequence(list(range(40)))


def test_a_step_that_does_not_fit_names_the_sequences_and_changes_nothing():
    cache = small_cache(num_blocks=4)
    a, b = cache.sequence(list(range(20))), cache.sequence(list(range(100, 120)))
    with pytest.raises(kv.OutOfBlocks) as error:
        cache.step([(a, 20), (b, 20)])
    assert error.value.sequences == (b.id,)
    assert cache.stats().free == 4
    assert cache.fits([(a, 20), (b, 20)]) == 1
