"""Two steps in flight: the next is opened before anybody knows what this one samples."""

from __future__ import annotations

import pytest
import torch

import kvpool as kv
from test_step import small_cache


def opened(cache: kv.KVCache, sequences: list[kv.Sequence]) -> kv.Step:
    """A step whose samples nobody knows yet."""
    step = cache.step([(seq, 100) for seq in sequences])
    cache.extend(step, None)
    return step


def test_what_is_sampled_on_the_device_is_what_the_next_step_computes():
    cache = small_cache()
    a, b, c = (cache.sequence([i] * (5 + i)) for i in range(3))
    one = opened(cache, [a, b, c])
    two = cache.step([(c, 1), (a, 1), (b, 1)], start=False)
    assert (two.token_ids < 0).all()
    one.next_ids = torch.tensor([70, 71, 72])
    two.start()
    assert two.token_ids.tolist() == [72, 70, 71]
    assert two.positions.tolist() == [7, 5, 6]
    cache.resolve(one, one.next_ids)
    one.close()
    two.close()
    cache.extend(two, [82, 80, 81])
    assert [seq.tokens[-2:] for seq in (a, b, c)] == [[70, 80], [71, 81], [72, 82]]
    cache.check()


def test_known_and_unknown_tokens_share_a_step():
    cache = small_cache()
    decoding, prompt = cache.sequence([1, 2, 3]), cache.sequence([4, 5, 6, 7])
    one = opened(cache, [decoding])
    one.next_ids = torch.tensor([9])
    two = cache.step([(prompt, 100), (decoding, 1)])
    assert two.token_ids.tolist() == [4, 5, 6, 7, 9]


def test_a_step_that_starts_before_its_tokens_are_sampled_is_refused_and_undone():
    cache = small_cache()
    a = cache.sequence([1, 2, 3])
    one = opened(cache, [a])
    with pytest.raises(kv.KVError, match="set that one's next_ids first"):
        cache.step([(a, 1)])
    one.next_ids = torch.tensor([9])
    assert cache.step([(a, 1)]).token_ids.tolist() == [9]


def test_a_token_unknown_for_longer_than_a_step_is_refused_by_name():
    cache = small_cache()
    a, b = cache.sequence([1, 2, 3]), cache.sequence([4, 5])
    one = opened(cache, [a])
    two = opened(cache, [b])
    one.close()
    with pytest.raises(kv.KVError, match=f"sequence {a.id} has an unknown token"):
        cache.step([(a, 1)])
    cache.resolve(one, [7])
    two.next_ids = torch.tensor([8])
    assert cache.step([(a, 1), (b, 1)]).token_ids.tolist() == [7, 8]


def test_when_a_step_fails_the_next_falls_with_it():
    cache = small_cache()
    a, b = cache.sequence([1, 2, 3]), cache.sequence(list(range(20)))
    one = opened(cache, [a])
    two = cache.step([(a, 1), (b, 20)], start=False)
    one.close(failed=True)
    assert not two.open
    with pytest.raises(kv.KVError, match="fell with the one before"):
        two.close()
    assert a.tokens == [1, 2, 3]
    assert (a.num_computed_tokens, b.num_computed_tokens, cache.stats().used) == (0, 0, 0)
    cache.check()
    again = opened(cache, [a, b])
    again.next_ids = torch.tensor([5, 6])
    assert cache.step([(b, 1), (a, 1)]).token_ids.tolist() == [6, 5]


def test_when_the_second_fails_the_first_goes_on():
    cache = small_cache()
    a = cache.sequence([1, 2, 3])
    one = opened(cache, [a])
    one.next_ids = torch.tensor([9])
    with pytest.raises(ZeroDivisionError), cache.step([(a, 1)]):
        raise ZeroDivisionError
    assert cache.step([(a, 1)]).token_ids.tolist() == [9]
    cache.resolve(one, [9])
    one.close()
    assert a.tokens == [1, 2, 3, 9]


def test_a_step_is_resolved_once():
    cache = small_cache()
    a = cache.sequence([1, 2, 3])
    one = cache.step([(a, 3)])
    with pytest.raises(kv.KVError, match="resolve needs a step"):
        cache.resolve(one, [4])
    cache.extend(one, None)
    with pytest.raises(kv.LayoutError, match="one token a sample: 1, got 2"):
        cache.resolve(one, [4, 5])
    cache.resolve(one, [4])
    with pytest.raises(kv.KVError, match="resolve needs a step"):
        cache.resolve(one, [4])


def test_a_sequence_released_in_flight_gives_its_blocks_back_when_the_last_of_its_steps_ends():
    cache = small_cache()
    a = cache.sequence([1, 2, 3])
    one = opened(cache, [a])
    one.next_ids = torch.tensor([9])
    two = cache.step([(a, 1)])
    a.release()
    cache.resolve(one, [9])
    one.close()
    assert cache.stats().used == 1
    two.close()
    assert cache.stats().used == 0
    assert cache.peek([1, 2, 3, 9, 5]) == 4  # what the second step computed is found
    cache.check()


def test_a_size_that_does_not_fit_leaves_no_step_open():
    cache = small_cache()
    a = cache.sequence([1, 2, 3])
    for _ in range(3):
        with pytest.raises(kv.KVError, match="must hold the step's 1 sequences and 3 tokens"):
            cache.step([(a, 3)], pad_to=(1, 2))
    with cache.step([(a, 3)], pad_to=(1, 4)):
        pass
    assert a.num_computed_tokens == 3


def test_nothing_fits_beside_an_open_step_while_a_resize_waits():
    cache = small_cache()
    a, b = cache.sequence([1, 2, 3]), cache.sequence([4, 5])
    with cache.step([(a, 3)]):
        assert cache.fits([(b, 2)]) == 1
        assert cache.resize(cache.plan.budget_bytes // 2).waiting
        assert cache.fits([(b, 2)]) == 0
    assert cache.fits([(b, 2)]) == 1


def test_a_step_that_was_not_started_writes_nothing_and_none_starts_twice():
    cache = small_cache()
    a, b = cache.sequence([1, 2, 3]), cache.sequence([4, 5])
    one, two = opened(cache, [a]), cache.step([(b, 2)], start=False)
    plan = cache.plan.spec.layers[0].kinds[0]
    k = torch.zeros(2, plan.num_kv_heads, plan.head_dim)
    with pytest.raises(kv.LayoutError, match="needs a started step"):
        cache.write(0, two, k, k)
    one.close()
    two.start()
    cache.write(0, two, k, k)
    with pytest.raises(kv.KVError, match="was started already"):
        two.start()
