"""From logits to token ids: greedy, temperature, top-k, top-p, one seeded generator a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvpool.errors import KVError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: 0 takes the best token.
        top_k: Only the k best tokens; 0 for all.
        top_p: Only the best tokens that together have this probability.
        seed: Of this request's own generator; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise KVError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise KVError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise KVError(f"top_p must be in (0, 1], got {self.top_p}")


GREEDY = Sampling()


#: A nucleus (top_p) is looked for among so many best tokens first.
_NUCLEUS = 256


class Sampler:
    """Samples one request, reproducibly: equal seeds give equal tokens whatever else is in the batch."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()

    def __call__(self, logits: torch.Tensor) -> int:
        """Choose a token from `logits [vocabulary]`."""
        if self.sampling.temperature == 0:
            return int(best(logits[None])[0])
        ids, probabilities = distribution(logits, self.sampling)
        below = probabilities.cumsum(0)
        drawn = torch.rand(1, generator=self._generator) * below[-1]
        place = min(int(torch.searchsorted(below, drawn, right=True)), len(below) - 1)
        return place if ids is None else int(ids[place])


def distribution(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the tokens that may be drawn and their weights, which need not sum to one.

    No vocabulary is sorted, which takes milliseconds, only the best tokens; the values of all where these do not do.

    Args:
        logits: `[vocabulary]`.
        sampling: With a temperature above 0.

    Returns:
        `(ids, weights)`; ids None stands for all tokens in order.
    """
    scaled = logits.float().cpu() / sampling.temperature  # the generator is the CPU's
    if sampling.top_k and sampling.top_k < len(scaled):
        values, ids = scaled.topk(sampling.top_k)
        weights = values.softmax(-1)
    else:
        weights = scaled.softmax(-1)
        if sampling.top_p == 1:
            return None, weights
        ids = None
    if sampling.top_p == 1:
        return ids, weights
    kept, order = weights.topk(min(_NUCLEUS, len(weights)))
    keep = int((kept.cumsum(0) - kept < sampling.top_p).sum())  # the best token always stays
    if keep == len(kept) < len(weights):
        order = _nucleus(weights, sampling.top_p)
        kept, keep = weights[order], len(order)
    return (order if ids is None else ids[order])[:keep], kept[:keep]


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the fewest tokens that have this probability together, of equal ones the first; only values are sorted."""
    values = weights.numpy()
    falling = np.sort(values)[::-1]
    keep = int((np.cumsum(falling) - falling < top_p).sum())
    least = falling[keep - 1]
    above = np.flatnonzero(values > least)
    return torch.from_numpy(np.concatenate([above, np.flatnonzero(values == least)[: keep - len(above)]]))


def best(logits: torch.Tensor) -> torch.Tensor:
    """Return the best token of every row of `logits [S, vocabulary]`, where they are; the first of equals."""
    if logits.device.type == "cpu":  # numpy looks at many numbers at once where torch looks at one
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(-1)


def sample(logits: torch.Tensor, samplers: list[Sampler]) -> torch.Tensor:
    """Choose one token for each row of `logits [S, vocabulary]`: `[S]` int64 there; greedy rows in one call."""
    chosen = best(logits)
    for row, sampler in enumerate(samplers):
        if sampler.sampling.temperature > 0:
            chosen[row] = sampler(logits[row])
    return chosen
