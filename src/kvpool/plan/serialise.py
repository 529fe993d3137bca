"""Frozen dataclasses to JSON and back, by their annotations. Knows no class by name and trusts no input."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from kvpool.errors import PlanError

_T = TypeVar("_T")


#: Annotations of a class, resolved once.
_hints = cache(get_type_hints)


def encode(value: object) -> Any:
    """Return `value` as what `json.dumps` takes: dataclasses become objects with their class name in `type`."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        body = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **body}
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode(data: Any, target: type[_T], where: str = "plan") -> _T:
    """Build a `target` from what `encode` returned.

    Raises:
        PlanError: A field is missing, unknown or of another type; the message names it.
    """
    return cast(_T, _decode(data, target, where))


def _decode(data: Any, hint: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin is types.UnionType or origin is Union:
        return _decode_union(data, get_args(hint), where)
    if is_dataclass(hint) and isinstance(hint, type):
        return _decode_object(data, hint, where)
    if origin is tuple:
        args = get_args(hint)
        if isinstance(data, list):
            if len(args) == 2 and args[1] is Ellipsis:
                return tuple(_decode(item, args[0], f"{where}[{i}]") for i, item in enumerate(data))
            if len(args) == len(data):
                return tuple(
                    _decode(item, a, f"{where}[{i}]") for i, (item, a) in enumerate(zip(data, args, strict=True))
                )
    elif hint is range:
        if isinstance(data, list) and len(data) == 3 and all(type(x) is int for x in data) and data[2]:
            return range(*data)
    elif hint is type(None):
        if data is None:
            return None
    elif type(data) is hint:
        return data
    raise PlanError(f"{where}: expected {getattr(hint, '__name__', hint)}, found {str(data)[:60]!r}")


def _decode_union(data: Any, options: tuple[Any, ...], where: str) -> Any:
    for option in options:
        if isinstance(data, dict) and is_dataclass(option):
            if data.get("type") == getattr(option, "__name__", ""):
                return _decode(data, option, where)
        elif not isinstance(data, dict) and not is_dataclass(option):
            try:
                return _decode(data, option, where)
            except PlanError:
                continue
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise PlanError(f"{where}: expected {names}, found {str(data)[:60]!r}")


def _decode_object(data: Any, cls: type, where: str) -> Any:
    if not isinstance(data, dict) or data.get("type") != cls.__name__:
        raise PlanError(f"{where}: expected a {cls.__name__}, found {str(data)[:60]!r}")
    names = {field.name for field in fields(cls)}
    given = set(data) - {"type"}
    if given != names:
        odd = sorted(names ^ given)
        raise PlanError(f"{where}: {cls.__name__} has other fields: {', '.join(odd)}")
    hints = _hints(cls)
    return cls(**{name: _decode(data[name], hints[name], f"{where}.{name}") for name in names})
