"""`python -m kvpool`: the command line."""

from __future__ import annotations

from kvpool.cli import main

main()
