"""What a client may ask for, read from JSON; every mistake gets a message of its own. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpool.engine import Params, Sampling
from kvpool.errors import KVError


class BadRequest(KVError):
    """The client's mistake.

    Args:
        message: What was wrong, what is allowed.
        param: Name of the field.
        status: HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request.

    Attributes:
        prompts: One list of token ids each.
        n: Answers a prompt.
        stream: Send tokens as they come.
        include_usage: End the stream with the token counts.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: Params
    n: int
    stream: bool
    include_usage: bool


#: Accepted and without effect when they have this value; anything else is refused by name.
_INERT: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True, False),
}


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", name)
    return float(value)


def _integer(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer from {low} to {high}, got {value!r}", name)
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise BadRequest(f"{name} must be true or false, got {value!r}", name)
    return bool(value)


def read_params(body: dict[str, Any], *, salt: str | None, deadline_s: float | None, most_tokens: int) -> Params:
    """Read how to answer.

    Args:
        body: The request.
        salt: Of the client's API key.
        deadline_s: Longest time a request may take.
        most_tokens: Longest answer.

    Raises:
        BadRequest: A field has a value that is not allowed.
    """
    for name, allowed in _INERT.items():
        if body.get(name) not in allowed:
            raise BadRequest(f"{name}={body[name]!r} is not supported; leave it out", name)
    stop = body.get("stop")
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > 4 or any(not isinstance(t, str) or not t for t in texts):
        raise BadRequest(f"stop must be a text or a list of at most four, none empty, got {stop!r}", "stop")
    if body.get("timeout") is not None:
        asked = _number(body, "timeout", 0.0, 1e-3, 86400.0)
        deadline_s = asked if deadline_s is None else min(asked, deadline_s)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    seed = body.get("seed")
    return Params(
        max_new_tokens=_integer(body, limit, min(128, most_tokens), 1, most_tokens),
        sampling=Sampling(
            temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
            top_k=_integer(body, "top_k", 0, 0, 2**31),
            top_p=_number(body, "top_p", 1.0, 1e-9, 1.0),
            seed=None if seed is None else _integer(body, "seed", 0, -(2**63), 2**63 - 1),
        ),
        stop_ids=frozenset() if _flag(body, "ignore_eos") else None,
        stop=tuple(texts),
        priority=_integer(body, "priority", 0, -1000, 1000),
        deadline_s=deadline_s,
        salt=salt,
    )


def read_ask(body: Any, tokenizer: Any, *, chat: bool, longest: int, salt: str | None, deadline_s: float | None) -> Ask:
    """Read a completion or chat request.

    Args:
        body: Parsed JSON.
        tokenizer: Of the model.
        chat: The body has `messages`, not `prompt`.
        longest: Longest sequence in tokens.
        salt: Of the client's API key.
        deadline_s: Longest time a request may take.

    Raises:
        BadRequest: Naming the field, its value and what is allowed.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    prompts = [_chat_ids(body, tokenizer)] if chat else _prompt_ids(body, tokenizer)
    for ids in prompts:
        if not ids:
            raise BadRequest("the prompt has no tokens", "messages" if chat else "prompt")
        if len(ids) >= longest:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; with at least one new token the longest sequence here is {longest}",
                "messages" if chat else "prompt",
            )
    most = longest - max(map(len, prompts))
    params = read_params(body, salt=salt, deadline_s=deadline_s, most_tokens=most)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest(f"stream_options must be an object, got {options!r}", "stream_options")
    return Ask(
        tuple(map(tuple, prompts)),
        params,
        _integer(body, "n", 1, 1, 8),
        _flag(body, "stream"),
        _flag(options, "include_usage"),
    )


def _chat_ids(body: dict[str, Any], tokenizer: Any) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    if not tokenizer.chat_template:
        raise BadRequest("this model has no chat template; use /v1/completions", "messages")
    turns = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant"):
            raise BadRequest(f"{where}.role must be system, developer, user or assistant", "messages")
        content = message.get("content")
        if isinstance(content, list):  # parts
            if any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
                raise BadRequest(f"{where}.content may hold text parts only", "messages")
            content = "".join(str(p.get("text", "")) for p in content)
        if not isinstance(content, str):
            raise BadRequest(f"{where}.content must be text, got {type(content).__name__}", "messages")
        role = "system" if message["role"] == "developer" else message["role"]
        turns.append({"role": role, "content": content})
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    except Exception as error:  # templates raise what they like
        raise BadRequest(f"the chat template refused these messages: {error}", "messages") from None
    return [int(i) for i in ids]


def _prompt_ids(body: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    prompt = body.get("prompt")
    vocabulary = len(tokenizer)
    if isinstance(prompt, str):
        return [tokenizer(prompt).input_ids]
    if isinstance(prompt, list) and len(prompt) > 0:
        if all(isinstance(p, str) for p in prompt) and len(prompt) <= 64:
            return [tokenizer(p).input_ids for p in prompt]
        rows = prompt if isinstance(prompt[0], list) else [prompt]
        if len(rows) <= 64 and all(_is_ids(row, vocabulary) for row in rows):
            return rows
    raise BadRequest(
        f"prompt must be a text, at most 64 texts, or token ids below {vocabulary} (a list, or a list of lists)",
        "prompt",
    )


def _is_ids(row: object, vocabulary: int) -> bool:
    return isinstance(row, list) and all(type(i) is int and 0 <= i < vocabulary for i in row)
