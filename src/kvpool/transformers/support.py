"""Which model families run on a `PagedCache`, as data. The tests read the same file; the page in docs is made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

MODES = ("kernel", "gather", "refused")


@dataclass(frozen=True, slots=True)
class Support:
    """One family.

    Attributes:
        family: Its name in the tests.
        mode: `kernel`: attention reads the pages, states their pool; `gather`: the model's own attention gets dense
            keys and values (which every family of mode `kernel` can do as well); `refused`.
        note: What to know; for `gather` and `refused` the reason.
    """

    family: str
    mode: str
    note: str = ""


def support() -> tuple[Support, ...]:
    """Return every family that is known to run, or known not to, on transformers' real modeling code."""
    data = json.loads(files("kvpool.transformers").joinpath("families.json").read_text(encoding="utf-8"))
    return tuple(Support(family, row["mode"], row.get("note", "")) for family, row in data["families"].items())


def table(stores: dict[str, str]) -> str:
    """Return the table of families as Markdown.

    Args:
        stores: What the layers of each family store, in words.
    """
    lines = ["| family | runs as | its layers store | note |", "|---|---|---|---|"]
    lines += [f"| {row.family} | {row.mode} | {stores[row.family]} | {row.note} |" for row in support()]
    return "\n".join(lines) + "\n"
