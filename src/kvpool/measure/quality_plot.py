"""Two pictures of `kvpool quality`: the error of every layer by format, and stored bits against KL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpool.errors import KVError
from kvpool.measure.quality import Row


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the rows (the baseline first) into an image file; the suffix chooses the format.

    Raises:
        KVError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVError("--plot needs matplotlib; install kvpool[plot], or leave it out") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows[1:]:
        left.plot(list(row.layers), list(row.layers.values()), marker=".", label=row.codec)
        right.errorbar(row.bits_per_element, row.kl, yerr=2 * row.kl_stderr, marker="o", capsize=3)
        right.annotate(row.codec, (row.bits_per_element, row.kl), textcoords="offset points", xytext=(6, 4))
    left.set(xlabel="layer", ylabel="relative error of the attention output", yscale="log")
    left.legend(fontsize="small")
    right.set(xlabel="stored bits for one element, scales included", ylabel="KL of the next token", yscale="log")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise KVError(f"cannot write the plot to {str(path)!r}: {error}") from error
