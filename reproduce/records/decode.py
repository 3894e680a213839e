"""Turn parsed JSON into typed dataclasses, strictly: whatever does not fit is told by its place in the file."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

__all__ = ["DecodeError", "Json", "decode"]

T = TypeVar("T")
Json = Any  # whatever `json` reads and writes: None, bool, int, float, str, and lists and dicts of them


class DecodeError(ValueError):
    """Tell what is wrong where, in one line: `results[3].status: ...`."""


def decode(kind: type[T], value: Json, where: str = "") -> T:
    """Return `value` as `kind`: a dataclass, `list`, `dict`, `Literal`, a plain JSON type, or one of these `| None`.

    A dataclass takes an object with exactly its fields; those with a default may be absent. An `int` is
    taken where a `float` is asked for, and nothing else is converted.

    Raises:
        DecodeError: something does not fit; the message starts with the place of the first such thing.
    """
    return typing.cast("T", _decode(kind, value, where))


def _decode(kind: Any, value: Json, where: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type[Any]", kind), value, where)

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise _misfit(where, "one of " + ", ".join(map(repr, arguments)), value)
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (option for option in arguments if option is not types.NoneType)
        return _decode(kind, value, where)
    if origin is list:
        if not isinstance(value, list):
            raise _misfit(where, "a list", value)
        return [_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise _misfit(where, "an object", value)
        return {key: _decode(arguments[1], item, _under(where, key)) for key, item in value.items()}
    return _decode_plain(kind, value, where)


def _decode_plain(kind: Any, value: Json, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value) if abs(value) <= sys.float_info.max else _decode_plain(kind, math.inf, where)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _misfit(where, PLAIN[kind], value)
    return value


PLAIN = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}


def _decode_dataclass(kind: type[Any], value: Json, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _misfit(where, "an object", value)
    fields = {field.name: field for field in dataclasses.fields(kind)}

    unknown = [key for key in value if key not in fields]
    if unknown:
        raise DecodeError(f"{_under(where, unknown[0])}: unknown; known are {', '.join(fields)}")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in value and not optional:
            raise DecodeError(f"{_under(where, name)}: missing")

    hints = typing.get_type_hints(kind)
    return kind(**{name: _decode(hints[name], item, _under(where, name)) for name, item in value.items()})


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _misfit(where: str, wanted: str, value: Json) -> DecodeError:
    shown = repr(value)
    if len(shown) > 40:
        shown = shown[:37] + "..."
    return DecodeError(f"{where or 'the whole file'}: expected {wanted}, got {shown}")
