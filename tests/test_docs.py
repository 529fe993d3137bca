"""README and docs hold: their Python runs, their links lead somewhere, their commands exist.

Blocks marked ```python are run in order, one namespace a file. A block marked ```python no-run is not; it is for
what the machine of a test lacks (a GPU, a model of many gigabytes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (info string, line of the first line inside, content) of every fenced block."""
    for match in FENCE.finditer(text):
        yield match[1].strip(), text.count("\n", 0, match.start(2)) + 1, match[2]


def runnable(text: str) -> list[tuple[int, str]]:
    return [
        (line, code) for info, line, code in blocks(text) if info.split()[:1] == ["python"] and "no-run" not in info
    ]


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [p for p in TEXTS if runnable(p.read_text())], ids=ids)
def test_python_in_a_text_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in runnable(path.read_text()):
        # Empty lines before it make a traceback name the line of the text.
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


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
    text = "a\n```python\nx = 1\n```\n\n```python no-run\nraise\n```\n```text\nno\n```\n"
    assert runnable(text) == [(3, "x = 1\n")]
    assert [info for info, _, _ in blocks(text)] == ["python", "python no-run", "text"]
