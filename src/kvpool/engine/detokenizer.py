"""From token ids to text as it grows: never half a character, never half a stop text."""

from __future__ import annotations

from typing import Any

#: What decoders put where bytes are no character (yet).
REPLACEMENT = "\ufffd"
#: A character has at most four bytes, hence at most so many byte tokens; more replacements than that are real.
LONGEST_CHARACTER = 4


class Detokenizer:
    """Decodes one answer.

    Only the last tokens are decoded again with every new one: those since the last certain border, and the ones just
    before it, since tokenizers join neighbours.

    Args:
        tokenizer: With `decode(ids, skip_special_tokens=True)`.
        stop: Texts that end the answer.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._before, self._border = 0, 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token and return the text that became certain."""
        self._ids.append(token)
        before = self._decode(self._ids[self._before : self._border])
        now = self._decode(self._ids[self._before :])
        waiting = len(self._ids) - self._border
        if now.endswith(REPLACEMENT) and waiting <= LONGEST_CHARACTER:
            return ""
        self._before, self._border = self._border, len(self._ids)
        return self._release(now[len(before) :], last=False)

    def finish(self) -> str:
        """Return what was still held back."""
        before = self._decode(self._ids[self._before : self._border])
        now = self._decode(self._ids[self._before :])
        self._before = self._border = len(self._ids)
        return self._release(now[len(before) :], last=True)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _release(self, text: str, *, last: bool) -> str:
        """Cut at a stop text, and hold back what may become one."""
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            text = text[: min(found)]
        elif not last:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
