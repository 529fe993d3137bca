"""From logits to token ids: greedy, temperature, top-k, top-p, one seeded generator a request."""

from __future__ import annotations

from dataclasses import dataclass

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
        chosen = self.sampling
        if chosen.temperature == 0:
            return int(logits.argmax())
        scaled = logits.float().cpu() / chosen.temperature  # the generator is the CPU's
        values, order = scaled.sort(descending=True, stable=True)
        keep = torch.ones_like(values, dtype=torch.bool)
        if chosen.top_k:
            keep[chosen.top_k :] = False
        if chosen.top_p < 1:
            probability = values.masked_fill(~keep, float("-inf")).softmax(-1)
            keep &= probability.cumsum(-1) - probability < chosen.top_p  # the best token always stays
        probability = values.masked_fill(~keep, float("-inf")).softmax(-1)
        return int(order[torch.multinomial(probability, 1, generator=self._generator)])


def sample(logits: torch.Tensor, samplers: list[Sampler]) -> list[int]:
    """Choose one token for each row of `logits [S, vocabulary]`; greedy rows in one call."""
    if all(s.sampling.temperature == 0 for s in samplers):
        best: list[int] = logits.argmax(-1).tolist()
        return best
    return [sampler(row) for sampler, row in zip(samplers, logits, strict=True)]
