"""A static batch: ragged prefill, then decode steps for all sequences together."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from kvpool.engine.sampler import GREEDY, Sampler, Sampling, sample
from kvpool.sequence import Sequence
from kvpool.transformers import PackedCache


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
        prompt_ids: Token ids of the prompt, at least one.
        max_new_tokens: Most tokens to generate.
        stop_ids: Tokens that end the answer; they are part of `Answer.token_ids`.
    """

    prompt_ids: SequenceOf[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY


@dataclass(slots=True)
class Answer:
    """What was generated for one request.

    Attributes:
        cached_tokens: Prompt tokens found in the prefix tree.
        finish_reason: `stop`, `length`, or `aborted`.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "aborted"


@dataclass(slots=True)
class Timing:
    """Tokens and seconds of the two phases of a batch."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    peak_blocks: tuple[int, ...] = ()


def generate(
    model: PackedCache,
    requests: SequenceOf[Request],
    on_token: Callable[[int, int], None] | None = None,
    timing: Timing | None = None,
) -> list[Answer]:
    """Answer all requests together.

    Args:
        model: A model on a paged cache.
        requests: Prompts; equal prefixes are computed once.
        on_token: Called with (request index, token id) for every generated token.
        timing: Filled while running, also when the run is interrupted.

    Returns:
        Answers in the order of the requests.

    Raises:
        OutOfBlocks: The batch needs more blocks than the plan has.
    """
    cache = model.cache
    timing = Timing() if timing is None else timing
    answers = [Answer(len(r.prompt_ids)) for r in requests]
    samplers = [Sampler(r.sampling) for r in requests]
    sequences: dict[int, Sequence] = {}
    try:
        for index, request in enumerate(requests):
            sequences[index] = cache.sequence(request.prompt_ids)
        running = {seq.id: index for index, seq in sequences.items()}
        while running:
            started = time.perf_counter()
            items = [(sequences[index], len(sequences[index])) for index in running.values()]
            with cache.step(items) as step:
                logits = model.forward(step)
            owners = [running[step.sequences[row]] for row in step.sample_seqs.tolist()]
            ids = sample(logits, [samplers[index] for index in owners])
            cache.extend(step, ids)
            _count(timing, step.total_tokens, len(ids), time.perf_counter() - started)
            used = [group.used for group in cache.stats().groups]
            timing.peak_blocks = tuple(map(max, used, timing.peak_blocks or used))
            for index, token in zip(owners, ids, strict=True):
                answer, request = answers[index], requests[index]
                answer.cached_tokens = sequences[index].num_cached_tokens
                answer.token_ids.append(token)
                if on_token:
                    on_token(index, token)
                stopped = token in request.stop_ids
                if stopped or len(answer.token_ids) == request.max_new_tokens:
                    answer.finish_reason = "stop" if stopped else "length"
                    del running[sequences[index].id]
                    sequences.pop(index).release()
    finally:
        for seq in sequences.values():
            seq.release()
    return answers


def _count(timing: Timing, computed: int, sampled: int, seconds: float) -> None:
    """A step that computes more rows than it samples is prefill."""
    if computed > sampled:
        timing.prefill_tokens += computed
        timing.prefill_s += seconds
    else:
        timing.decode_tokens += computed
        timing.decode_s += seconds
