"""Sampling: what may be drawn is what a full sort would keep, and what is drawn follows its probabilities."""

from __future__ import annotations

import pytest
import torch

from kvpool.engine.sampler import Sampler, Sampling, best, distribution, sample


def sorted_distribution(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Sort everything, cut, normalise."""
    values, order = (logits.float() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, order = values[: sampling.top_k], order[: sampling.top_k]
    p = values.softmax(-1)
    keep = p.cumsum(-1) - p < sampling.top_p
    p = p[keep] / p[keep].sum()
    return dict(zip(order[keep].tolist(), p.tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (0, 0.999), (400, 0.5), (9999, 0.7), (1, 0.1)]
)
def test_what_may_be_drawn_is_what_a_full_sort_keeps(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(5)) * 2
    sampling = Sampling(temperature, top_k, top_p)
    ids, weights = distribution(logits, sampling)
    got = dict(zip(range(6000) if ids is None else ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    want = sorted_distribution(logits, sampling)
    assert top_p == 1 or abs(len(got) - len(want)) <= 1  # rounding at the border of a nucleus
    assert all(abs(got.get(i, 0) - p) < 1e-5 for i, p in want.items())


def test_of_equal_tokens_at_the_border_of_a_nucleus_the_first_are_kept() -> None:
    ids, _ = distribution(torch.zeros(1024), Sampling(1.0, top_p=0.375))
    assert ids is not None
    assert sorted(ids.tolist()) == list(range(384))


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    for sampling in (Sampling(1.0, seed=1), Sampling(1.0, top_k=3, seed=2), Sampling(1.0, top_p=0.8, seed=3)):
        sampler, want = Sampler(sampling), sorted_distribution(logits, sampling)
        drawn = torch.tensor([sampler(logits) for _ in range(4000)]).bincount(minlength=4) / 4000
        for token in range(4):
            assert abs(float(drawn[token]) - want.get(token, 0.0)) < 0.03, sampling


def test_greedy_rows_take_the_first_of_the_best_beside_sampled_ones() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 9.0, 1.0], [5.0, 0.0, 0.0]], dtype=torch.bfloat16)
    assert best(logits).tolist() == [1, 1, 0]
    samplers = [Sampler(Sampling()), Sampler(Sampling(0.01, seed=0)), Sampler(Sampling())]
    assert sample(logits, samplers).tolist() == [1, 1, 0]
