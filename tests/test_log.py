"""Structured logging: fields as text or JSON, levels and formats from one setting."""

from __future__ import annotations

import io
import json
import logging

import pytest

import kvpool as kv
from kvpool import log


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("kvpool")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, _ = before
    logger.setLevel(before[2])


def lines(setting: str | None, default: str = "warning") -> list[str]:
    stream = io.StringIO()
    log.configure(setting, default, stream)
    logger = logging.getLogger("kvpool.test")
    log.say(logger, logging.DEBUG, "step", rows=3)
    log.say(logger, logging.INFO, "request", id=7, why="length", seconds=0.5)
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("it failed")
    return stream.getvalue().splitlines()


def test_json_is_one_object_a_line_with_the_fields_as_keys():
    request, failure = map(json.loads, lines("info,json"))
    assert {key: request[key] for key in ("level", "logger", "event", "id", "why", "seconds")} == {
        "level": "info", "logger": "kvpool.test", "event": "request", "id": 7, "why": "length", "seconds": 0.5,
    }  # fmt: skip
    assert "ValueError: bad" in failure["exception"]


def test_text_names_the_fields_behind_the_event():
    debug, info, error, *trace = lines("debug")
    assert debug.endswith(" debug kvpool.test step rows=3")
    assert info.endswith(" info kvpool.test request id=7 why=length seconds=0.5")
    assert error.endswith(" error kvpool.test it failed")
    assert trace[-1] == "ValueError: bad"


def test_without_a_setting_only_warnings_are_shown():
    assert lines(None)[0].endswith("it failed")
    assert len(lines(None, default="info")) > len(lines(None))
    assert json.loads(lines("json")[0])["event"] == "it failed"


@pytest.mark.parametrize("setting", ["loud", "info,xml", "INFO"])
def test_an_unknown_word_is_refused_with_those_allowed(setting):
    with pytest.raises(kv.UnsupportedError, match="debug, info, warning, error, and text or json"):
        log.configure(setting)
