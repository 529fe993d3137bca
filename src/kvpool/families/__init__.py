"""From a model's `config.json` to what each of its layers stores. Works on the JSON alone."""

from __future__ import annotations

from kvpool.families.read import Model, read_model

__all__ = ["Model", "read_model"]
