"""Structured logging: an event and its fields, as text or as one JSON object a line. Knows nothing that is logged.

Modules log with `say(logger, level, event, **fields)` to Python's `logging`, under `kvpool.*`; nothing is shown before
`configure`, which the command line calls with the environment variable `KVPOOL_LOG`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from kvpool.errors import UnsupportedError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("text", "json")
#: Attribute of a log record that holds its fields.
_FIELDS = "kvpool_fields"


def say(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log an event with its fields; costs one comparison when nobody listens.

    Args:
        logger: Of the module that speaks.
        level: As in `logging`.
        event: What happened, in one or two words.
        fields: Plain values: numbers, texts, None.
    """
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """`12:00:00.123 info kvpool.engine request id=3 reason=length`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = getattr(record, _FIELDS, {})
        parts = [f"{clock}.{int(record.msecs):03}", record.levelname.lower(), record.name, record.getMessage()]
        parts += [f"{name}={value}" for name, value in fields.items()]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """`{"time": 1700000000.123, "level": "info", "logger": "kvpool.engine", "event": "request", "id": 3}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(setting: str | None, default: str = "warning", stream: TextIO | None = None) -> None:
    """Show kvpool's log on standard error.

    Args:
        setting: `LEVEL`, `FORMAT` or `LEVEL,FORMAT`: a level (`debug`, `info`, `warning`, `error`) and `text` or
            `json`; None for the default.
        default: The level when the setting names none.
        stream: Where to, instead.

    Raises:
        UnsupportedError: The setting has another word.
    """
    level, form = default, "text"
    for word in filter(None, (setting or "").replace(" ", "").split(",")):
        if word in LEVELS:
            level = word
        elif word in FORMATS:
            form = word
        else:
            raise UnsupportedError(f"KVPOOL_LOG={setting!r}: give one of {', '.join(LEVELS)}, and text or json")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("kvpool")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(LEVELS[level])
