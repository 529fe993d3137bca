"""README and docs hold: their Python runs, their links lead somewhere, their commands exist.

Blocks marked ```python are run in order, one namespace a file. A block marked ```python no-run is not; it is for
what the machine of a test lacks (a GPU, a model of many gigabytes). A block marked ```text output is what the Python
since the last one printed. Commands in ```console blocks have to exist, and so do the options given to them.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from kvpool.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (info string, line of the first line inside, content) of every fenced block."""
    for match in FENCE.finditer(text):
        yield match[1].strip(), text.count("\n", 0, match.start(2)) + 1, match[2]


def is_python(info: str) -> bool:
    return info.split()[:1] == ["python"] and "no-run" not in info


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [p for p in TEXTS if any(is_python(i) for i, _, _ in blocks(p.read_text()))], ids=ids)
def test_python_in_a_text_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    for info, line, content in blocks(path.read_text()):
        if is_python(info):
            with contextlib.redirect_stdout(printed):
                # Empty lines before it make a traceback name the line of the text.
                exec(compile("\n" * (line - 1) + content, str(path), "exec"), namespace)
        elif info == "text output":
            got = "".join(text.rstrip() + "\n" for text in printed.getvalue().splitlines())
            assert got == content, f"{ids(path)}, line {line}: this is not what was printed"
            printed = io.StringIO()


@cache
def options_of(command: str) -> set[str]:
    """Long options of `kvpool COMMAND`, those of its subcommands included."""
    module, attribute, _ = COMMANDS[command]
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer()
        app.command(command)(found)
        found = app
    todo, options = [get_command(found)], {"--help"}
    while todo:
        command = todo.pop()
        options |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        todo += getattr(command, "commands", {}).values()
    return options


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, words) of every command in console blocks; a trailing backslash continues a line."""
    for info, line, content in blocks(text):
        if info == "console":
            for number, command in enumerate(content.replace("\\\n", " ").splitlines(), line):
                yield number, re.sub(r"(^|\s)#.*", "", command.removeprefix("$ ")).split()


@pytest.mark.parametrize("path", TEXTS, ids=ids)
def test_commands_in_a_text_exist_with_their_options(path: Path) -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line, words in commands(path.read_text()):
        if words[:1] == ["make"]:
            wanted = {word for word in words[1:] if "=" not in word}
            assert wanted <= targets, f"line {line}: make has no {wanted - targets}"
        elif words and words[0].rpartition("/")[2] == "kvpool":
            assert words[1] in COMMANDS, f"line {line}: kvpool has no {words[1]}"
            options = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
            unknown = options - options_of(words[1])
            assert not unknown, f"line {line}: kvpool {words[1]} has no {unknown}"


@pytest.mark.parametrize("path", TEXTS, ids=ids)
def test_relative_links_in_a_text_lead_somewhere(path: Path) -> None:
    prose = FENCE.sub("", path.read_text())
    broken = [
        target
        for target in re.findall(r"\]\(([^)\s]+)\)", prose)
        if not re.match(r"[a-z]+:|#", target) and not (path.parent / target.partition("#")[0]).exists()
    ]
    assert not broken


@pytest.mark.parametrize("path", TEXTS, ids=ids)
def test_every_fence_of_a_text_is_closed_and_named(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n```") + text.startswith("```") == 2 * len(list(blocks(text)))
    unnamed = [line for info, line, _ in blocks(text) if not info]
    assert not unnamed, f"say what the blocks at lines {unnamed} are (text, console, python, ...)"


def test_the_block_finder_finds_lines_and_honours_no_run() -> None:
    text = "a\n```python\nx = 1\n```\n\n```python no-run\nraise\n```\n```text\nno\n```\n```console\n$ make a\n```\n"
    found = list(blocks(text))
    assert [(line, content) for info, line, content in found if is_python(info)] == [(3, "x = 1\n")]
    assert [info for info, _, _ in found] == ["python", "python no-run", "text", "console"]
    assert list(commands(text)) == [(13, ["make", "a"])]
