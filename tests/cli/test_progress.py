"""What takes more than a second shows how far it is, on standard error; what is quicker shows nothing."""

from __future__ import annotations

import contextlib
import time

import pytest

from kvpool.cli import progress
from kvpool.cli.progress import bar


def test_what_is_quick_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("counting") as shown:
        for _ in range(3):
            shown.advance("counted", 3)
    assert capsys.readouterr() == ("", "")


def test_what_takes_longer_shows_its_parts_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    with bar("counting") as shown:
        shown.expect(3)
        shown.advance("counted")
        shown.advance("counted")
        time.sleep(0.2)
        print("a result")
    out, err = capsys.readouterr()
    assert out == "a result\n"
    assert "counted" in err
    assert "2/3" in err


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    with contextlib.suppress(ZeroDivisionError), bar("counting"):
        time.sleep(0.05)
        raise ZeroDivisionError
    with bar("again") as shown:  # a second one could not be shown while the first is
        time.sleep(0.05)
        shown.advance("again", 1)
