"""`kvpool` itself: what it lists, and what it refuses."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.cli import COMMANDS, main


def test_without_a_command_all_of_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rum"])
    assert ended.value.code == 2
    assert "no command 'rum'; there are run, plan" in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvpool {kvpool.__version__}\n"
