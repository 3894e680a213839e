"""Read JSON into types, strictly: nothing is converted, and what does not fit is refused with its place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from reproduce.error import Error

T = TypeVar("T")
Json = Any  # None, bool, int, float, str, and lists and dicts of them


def read_json(path: Path) -> Json:
    """Return what the JSON file at `path` holds.

    Raises:
        Error: it cannot be read, or is not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Error(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> Json:
    """Return what the file called `where` holds.

    Raises:
        Error: it is not JSON, which has neither NaN nor infinity.
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Error(f"{where}: not JSON: {str(error).removeprefix('JSON is malformed: ')}") from error


def decode(kind: type[T], data: Json, where: str) -> T:
    """Return the contents of the file called `where` as `kind`, a type that msgspec knows.

    Raises:
        Error: something does not fit. The message names the place of the first such thing, as in `results[3].status`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise Error(": ".join(filter(None, (where, place.strip(".`"), what)))) from error
