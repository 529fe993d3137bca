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
    admitted: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: str = ""
    error: str = ""

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
    """A finished request.

    Attributes:
        text: What was generated, without special tokens and stop texts.
        time_to_first_token_s: From arrival; None when there was none.
        time_between_tokens_s: Mean, over all but the first.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str
    num_preemptions: int
    time_to_first_token_s: float | None
    time_between_tokens_s: float | None
