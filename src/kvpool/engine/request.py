"""One request: what is asked, how far it is, what it cost. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from kvpool.engine.detokenizer import Detokenizer
from kvpool.engine.sampler import GREEDY, Sampler, Sampling
from kvpool.errors import KVError
from kvpool.ledger import Retention
from kvpool.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Params:
    """How a request is answered.

    Attributes:
        max_new_tokens: Most tokens to generate.
        sampling: How tokens are chosen.
        stop_ids: Tokens that end the answer; None takes the model's own. They are part of `token_ids`, not of the text.
        stop: Texts that end the answer; they are cut off.
        priority: Higher is served first and preempted last.
        deadline_s: Seconds after which the request ends wherever it is; None for none.
        retention: Priorities of prompt ranges after release.
        salt: Only requests with the same salt share blocks.
    """

    max_new_tokens: int = 128
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    priority: int = 0
    deadline_s: float | None = None
    retention: tuple[Retention, ...] = ()
    salt: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise KVError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise KVError(f"deadline_s must be positive, got {self.deadline_s}")
        if any(not text for text in self.stop):
            raise KVError("a stop text must not be empty")


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way.

    Attributes:
        sequence: Its sequence in the cache; None while it waits without one.
        cached_tokens: Prompt tokens found in the prefix tree when it was first admitted.
        computed_tokens: Rows computed for it, over all admissions.
        recomputed_tokens: How many of those preemption cost: what was computed before and not found again. Negative
            when others had computed more of the same meanwhile.
        rows: Tokens of it in open steps.
        samples: Tokens of it that open steps sample: its sequence has them, and nobody knows them yet.
        lost_tokens: Computed tokens it gave back at its last preemption, until it is admitted again.
        num_preemptions: How often it gave its blocks back to others.
        finish_reason: `stop`, `length`, `abort`, `deadline` or `error`; empty while it runs.
    """

    id: int
    prompt_ids: SequenceOf[int]
    params: Params
    stop_ids: frozenset[int]
    sampler: Sampler
    detokenizer: Detokenizer
    arrived_s: float
    sequence: Sequence | None = None
    token_ids: list[int] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    admitted: bool = False
    admitted_s: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: str = ""
    error: str = ""

    @property
    def remaining(self) -> int:
        """Tokens of its sequence for the next steps to compute; 0 when open steps give the last it asked for."""
        assert self.sequence is not None
        if len(self.token_ids) + self.samples == self.params.max_new_tokens:
            return 0
        return len(self.sequence) - self.sequence.num_computed_tokens - self.rows

    def admit(self, now: float, found: int) -> None:
        """Note how many tokens its sequence found, in the step that admitted it."""
        if self.admitted_s is None:
            self.admitted_s, self.cached_tokens = now, found
        else:
            self.recomputed_tokens += self.lost_tokens - found
        self.admitted, self.lost_tokens = True, 0

    def preempt(self) -> None:
        """Note that its sequence gives its blocks back."""
        assert self.sequence is not None
        self.lost_tokens = self.sequence.num_computed_tokens
        self.admitted = False
        self.num_preemptions += 1

    def answer(self) -> Answer:
        """Return what it cost and gave so far."""
        first, last, count = self.first_token_s, self.last_token_s, len(self.token_ids)
        return Answer(
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            token_ids=self.token_ids,
            text=self.detokenizer.text,
            finish_reason=self.finish_reason,
            error=self.error,
            num_preemptions=self.num_preemptions,
            waited_s=None if self.admitted_s is None else self.admitted_s - self.arrived_s,
            time_to_first_token_s=None if first is None else first - self.arrived_s,
            time_between_tokens_s=None if first is None or last is None or count < 2 else (last - first) / (count - 1),
        )

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: higher priority, then earlier arrival."""
        return (-self.params.priority, self.id)

    @property
    def deadline(self) -> float | None:
        """When it ends at the latest, on the engine's clock."""
        return None if self.params.deadline_s is None else self.arrived_s + self.params.deadline_s


@dataclass(frozen=True, slots=True)
class Event:
    """One generated token, or the end of a request.

    Attributes:
        request: Id of the request.
        token_id: The token; None when the request ended without one.
        text: Text that became certain with it.
        finish_reason: Not empty on the last event of a request.
        error: Why a request ended with `error`.
    """

    request: int
    token_id: int | None
    text: str
    finish_reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request. In tokens: `computed = prompt - cached + recomputed + generated - 1`, if nothing cut it off.

    Attributes:
        cached_tokens: Prompt tokens that were found when it was first admitted.
        computed_tokens: Rows computed for it.
        recomputed_tokens: Rows that preemption cost.
        text: What was generated, without special tokens and stop texts.
        waited_s: From arrival to admission; None when it was never admitted.
        time_to_first_token_s: From arrival; None when there was none.
        time_between_tokens_s: Mean, over all but the first.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str
    num_preemptions: int
    waited_s: float | None
    time_to_first_token_s: float | None
    time_between_tokens_s: float | None
