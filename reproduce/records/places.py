"""Find the files of records, and convert parsed JSON to objects with types.

A value of the wrong type is an error, and is never converted silently.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from reproduce.error import Error
from reproduce.machine.description import ROOT

RUNS = Path("runs")
"""The folder for runs, in the current folder. git ignores it."""
PACKAGED = Path(__file__).parents[1] / "results"  # the folder of results in an installed package
RESULTS = PACKAGED if PACKAGED.is_dir() else ROOT / "results"
MEASURED = RESULTS / "measured"
# The folder for generated files. Nothing is written into an installed package.
OUT = Path() if RESULTS == PACKAGED else RESULTS
T = TypeVar("T")
Json = Any  # None, bool, int, float, str, and lists and dicts of them


def need_checkout(command: str, instead: str = "") -> None:
    """Raise `Error` if this program is an installed package instead of a checkout."""
    if RESULTS == PACKAGED:
        raise Error(
            f"{command} needs a checkout of the repository: run 'python -m reproduce {command}' "
            f"there{instead}"
        )


def find_record(name: str) -> Path:
    """Return the path of a record, given its path or its name.

    If `name` is not an existing path, the record is looked up by its name in `runs` and in
    `results/measured`. If no record has this name, the path `name` is returned unchanged.
    """
    path = Path(name)
    if path.exists() or path.name != name:
        return path
    file = name.removesuffix(".json") + ".json"
    for folder in (RUNS, MEASURED):
        named = folder / file
        if named.exists():
            return named
    return path


def read_json(path: Path) -> Json:
    """Read the JSON file at `path`.

    Raises:
        Error: The file cannot be read, or is not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Error(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> Json:
    """Parse the content of the file `where`.

    Raises:
        Error: The content is not JSON. NaN and infinity are not JSON.
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_not_a_number(content, where)
        problem = str(error).removeprefix("JSON is malformed: ")
        raise Error(f"{where}: not JSON: {problem}") from error


def _refuse_not_a_number(content: bytes, where: str) -> None:
    """Raise `Error` with the place of the first NaN or infinity, which other programs may write."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return
    for row, place, number in _not_numbers(data):
        of_row = f" of {row!r}" if row else ""
        raise Error(f"{where}: {place}: the value{of_row} is {number}, which is not a number")


def _not_numbers(data: Json, row: str = "", place: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield the row, the place and the value of each NaN or infinity in parsed JSON.

    Args:
        data: The JSON.
        row: The name of the row that has `data`, if it is known.
        place: The place of `data`, such as `results[3].samples`.
    """
    if isinstance(data, float) and not math.isfinite(data):
        yield row, place, data
    elif isinstance(data, dict):
        row = data.get("row", row)
        for name, value in data.items():
            yield from _not_numbers(value, row, f"{place}.{name}" if place else name)
    elif isinstance(data, list):
        for k, item in enumerate(data):
            yield from _not_numbers(item, row, f"{place}[{k}]")


def decode(kind: type[T], data: Json, where: str) -> T:
    """Convert parsed JSON to the type `kind` with msgspec.

    Raises:
        Error: A value has the wrong type. The message names the file, `where`, and the place in the
            file, such as `results[3].status`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        parts = filter(None, (where, place.strip(".`"), problem))
        raise Error(": ".join(parts)) from error
