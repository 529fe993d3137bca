"""A configuration as checked fields: every read names its aliases, every inference leaves a note. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvpool.errors import SpecError

#: Nothing real comes near; sums of products stay far inside 64 bits and tables stay readable.
MAX_LAYERS = 10_000
MAX_DIM = 2**24
MAX_TOKENS = 2**40

#: How large the model is: a configuration says so itself, unless it is a nested one that stores differences only.
SIZES = frozenset({"num_hidden_layers", "n_layer", "hidden_size", "n_embd", "num_attention_heads", "n_head"})


class Fields:
    """Reads one JSON object.

    Attributes:
        data: The object.
        where: Its name in messages (`config`, `text_config`).
        notes: Inferences, one sentence each, in the order they were made.
        defaults: What the model's own code fills in for absent fields.
        source: The file of that code.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "config",
        notes: list[str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        source: str = "",
    ) -> None:
        self.data = data
        self.where = where
        self.notes: list[str] = [] if notes is None else notes
        self.defaults = dict(defaults or {})
        self.source = source

    def note(self, text: str) -> None:
        """Record an inference, once."""
        if text not in self.notes:
            self.notes.append(text)

    def section(self, name: str) -> Fields | None:
        """Return a nested object, or None."""
        value = self.data.get(name)
        return Fields(value, f"{self.where}.{name}", self.notes) if isinstance(value, Mapping) else None

    def overlay(self, changes: Mapping[str, Any], where: str) -> Fields:
        """Return these fields with some replaced, for one layer."""
        return Fields({**self.data, **changes}, where, self.notes, self.defaults, self.source)

    def has(self, *names: str) -> bool:
        """True when one of `names` is present and not null, in the configuration or in its code's defaults."""
        return self.first(*names) is not None

    def first(self, *names: str) -> str | None:
        """Return the first of `names` that has a value; a default counts only where all of them are absent."""
        for name in names:
            if self.data.get(name) is not None:
                return name
        if any(name in self.data for name in names):
            return None
        return next((name for name in names if self._default(name) is not None), None)

    def _default(self, name: str) -> Any:
        return None if self.where == "config" and name in SIZES else self.defaults.get(name)

    def get(self, *names: str) -> Any:
        """Return the value of the first of `names` that has one, or None."""
        name = self.first(*names)
        if name is None:
            return None
        if self.data.get(name) is not None:
            return self.data[name]
        value = self._default(name)
        self.note(f"{name} is not in the config: {value}, as {self.source} has it")
        return value

    def integer(self, *names: str, least: int = 1, most: int = MAX_DIM) -> int | None:
        """Return the first of `names` as an integer in [least, most], or None.

        Raises:
            SpecError: It is no integer, or out of range.
        """
        name = self.first(*names)
        return None if name is None else self.check(name, self.get(name), least, most)

    def check(self, name: str, value: Any, least: int = 1, most: int = MAX_DIM) -> int:
        """Return `value` as an integer in [least, most]."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise SpecError(f"{self.where}.{name} must be an integer, got {str(value)[:60]!r}")
        if not least <= value <= most:
            raise SpecError(f"{self.where}.{name} must be between {least} and {most}, got {str(value)[:40]}")
        return value

    def need(self, *names: str, least: int = 1, most: int = MAX_DIM) -> int:
        """Return the first of `names` as an integer.

        Raises:
            SpecError: None of them is there.
        """
        value = self.integer(*names, least=least, most=most)
        if value is None:
            raise SpecError(f"{self.where} has no {names[0]}" + (f" (nor {', '.join(names[1:])})" if names[1:] else ""))
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field.

        Raises:
            SpecError: It is something else.
        """
        value = self.get(name)
        if value is None:
            return default
        if value not in (True, False):
            raise SpecError(f"{self.where}.{name} must be true or false, got {str(value)[:60]!r}")
        return bool(value)

    def per_layer(self, name: str, num_layers: int, check: Callable[[Any], bool], what: str) -> list[Any] | None:
        """Return a list field with one entry a layer, or None.

        Raises:
            SpecError: It is shorter than `num_layers`, or an entry is not `what`.
        """
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple | str):
            raise SpecError(f"{self.where}.{name} must be a list, got {str(value)[:60]!r}")
        if len(value) < num_layers:
            raise SpecError(f"{self.where}.{name} has {len(value)} entries for {num_layers} layers")
        if len(value) > num_layers:
            self.note(f"{name} has {len(value)} entries for {num_layers} layers: the first {num_layers} are used")
        for index, entry in enumerate(value[:num_layers]):
            if not check(entry):
                raise SpecError(f"{self.where}.{name}[{index}] must be {what}, got {str(entry)[:60]!r}")
        return list(value[:num_layers])

    def indices(self, name: str, num_layers: int, first: int = 0) -> set[int] | None:
        """Return a list of layer numbers as a set counted from 0, or None.

        Args:
            name: The field.
            num_layers: Layers there are.
            first: Number of the first layer in this field's counting.
        """
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise SpecError(f"{self.where}.{name} must be a list of layer numbers, got {str(value)[:60]!r}")
        return {self.check(f"{name}[{i}]", v, first, num_layers - 1 + first) - first for i, v in enumerate(value)}
