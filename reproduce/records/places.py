"""Find records (JSON files with results), and convert parsed JSON to typed objects.

If a value in a file has the wrong type, an error says so. Such a value is never converted silently.
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
    """Raise `Error` unless this program runs from a checkout of the git repository.

    Commands call this function if they need files that an installed package does not have.

    Args:
        command: The name of the command, such as `publish`.
        instead: What else the user could do. This text is added to the error message.
    """
    if RESULTS == PACKAGED:
        raise Error(
            f"{command} needs a checkout of the repository, and this is an installed package: run "
            f"'python -m reproduce {command}' in a checkout{instead}"
        )


def find_record(name: str) -> Path:
    """Return the path of a record (a file of results). `name` is its path or its name.

    If `name` is not an existing path, a record with this name is looked up in the folders `runs`
    and `results/measured`. If neither folder has it, `name` is returned as a path, and the error is
    raised when the caller reads it.
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
    """Read the JSON file at `path`, and return the parsed JSON.

    Raises:
        Error: The file cannot be read, or is not JSON.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Error(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> Json:
    """Parse the content of a JSON file, and return the parsed JSON.

    Args:
        content: The bytes of the file.
        where: The name of the file, for error messages.

    Raises:
        Error: The content is not JSON. NaN and infinity are not JSON, either.
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_not_a_number(content, where)
        problem = str(error).removeprefix("JSON is malformed: ")
        raise Error(f"{where}: not JSON: {problem}") from error


def _refuse_not_a_number(content: bytes, where: str) -> None:
    """If a JSON file contains NaN or infinity, raise an `Error` that says where the first one is.

    JSON does not allow these numbers, but some programs write them.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return
    for row, place, number in _not_numbers(data):
        of_row = f" of {row!r}" if row else ""
        raise Error(
            f"{where}: {place}: the value{of_row} is {number}, but JSON allows only finite numbers"
        )


def _not_numbers(data: Json, row: str = "", place: str = "") -> Iterator[tuple[str, str, float]]:
    """Find each NaN or infinity in parsed JSON; yield its row, its place and its value.

    Args:
        data: The parsed JSON, or a part of it.
        row: The name of the row (one result in a record) that contains `data`, if it is known.
        place: Where `data` is in the file, such as `results[3].samples`.
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
    """Convert parsed JSON to an object of the type `kind`, and check the types of all values.

    Args:
        kind: The type, such as `Record`.
        data: The parsed JSON.
        where: The name of the file, for error messages.

    Raises:
        Error: A value has the wrong type. The message names the file and the place in the file,
            such as `results[3].status`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        parts = filter(None, (where, place.strip(".`"), problem))
        raise Error(": ".join(parts)) from error
