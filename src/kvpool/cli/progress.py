"""A progress bar on standard error for what takes more than a second; what is quicker shows nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: What is done by then needs no bar.
PATIENCE_S = 1.0


class Bar:
    """What a bar shows. A terminal sees it move; elsewhere its end is one line.

    Args:
        what: Shown until the first part is done.
    """

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._rich = Progress(*columns, *times, console=Console(stderr=True), redirect_stdout=False)
        self._task = self._rich.add_task(what, total=None)
        self._lock = threading.Lock()
        self._over = self._shown = False

    def expect(self, total: int) -> None:
        """Set the number of parts."""
        self._rich.update(self._task, total=total)

    def advance(self, what: str, of: int | None = None) -> None:
        """Count one part of `of`, which `what` names."""
        self._rich.update(self._task, advance=1, description=what, total=of)

    def show(self) -> None:
        """Show it from now on, unless it is over."""
        with self._lock:
            if not self._over:
                self._shown = True
                self._rich.start()

    def end(self) -> None:
        """Show it no more."""
        with self._lock:
            self._over = True
            if self._shown:
                self._rich.stop()


@contextmanager
def bar(what: str) -> Iterator[Bar]:
    """Show a bar while something runs, from its second second on."""
    shown = Bar(what)
    timer = threading.Timer(PATIENCE_S, shown.show)
    timer.daemon = True
    timer.start()
    try:
        yield shown
    finally:
        timer.cancel()
        shown.end()
