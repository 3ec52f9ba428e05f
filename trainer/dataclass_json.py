"""Decoded JSON to frozen dataclasses, strictly: a missing, unknown or wrongly typed field is an error that names it.

Standard library only, without pydantic: the gate reads manifests and reports with it, and has to start in milliseconds.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class InvalidDataError(ValueError):
    """Data that does not fit the dataclass. The message names the field and the value that was found."""


@cache
def _type_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def parse_dataclass(kind: type[T], data: object, where: str = "") -> T:
    """`data`, as json.loads or tomllib returns it, as an instance of the dataclass `kind`.

    `where` is the path of `data` in a larger document, for the error message. Raises InvalidDataError.
    """
    if not isinstance(data, dict):
        raise InvalidDataError(f"{where or kind.__name__}: expected an object, found {_shortened(data)}")
    hints = _type_hints(kind)  # type: ignore[arg-type]  # a class is hashable; mypy doubts it for type[T]
    prefix = f"{where}." if where else ""
    if unknown := [name for name in data if name not in hints]:
        raise InvalidDataError(f"{prefix}{unknown[0]}: unknown field")
    values = {}
    for field in fields(typing.cast("Any", kind)):
        if field.name in data:
            values[field.name] = _parse_value(hints[field.name], data[field.name], prefix + field.name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InvalidDataError(f"{prefix}{field.name}: missing")
    return kind(**values)


def _parse_value(hint: Any, data: object, where: str) -> Any:
    """Supports what our dataclasses use: X | None, tuple[X, ...], dict[str, X], dataclasses and plain types."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        (hint,) = [argument for argument in arguments if argument is not type(None)]
        return _parse_value(hint, data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_parse_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: _parse_value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if is_dataclass(hint):
        return parse_dataclass(typing.cast("type[Any]", hint), data, where)
    if hint is float and type(data) is int:  # JSON and TOML writers drop the ".0"
        return float(data)
    if type(data) is hint:  # not isinstance: True is an int to Python, and a mistake in a file
        return data
    raise InvalidDataError(f"{where}: expected {getattr(hint, '__name__', hint)}, found {_shortened(data)}")


def _shortened(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 40 else text[:37] + "..."
