"""Say where records are. Read JSON into types strictly: without conversions, and with an error if it does not fit."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from reproduce.error import Error
from reproduce.machine.description import ROOT

RUNS = Path("runs")  # in the current folder; git ignores it
PACKAGED = Path(__file__).parents[1] / "results"  # in a wheel
RESULTS = PACKAGED if PACKAGED.is_dir() else ROOT / "results"
MEASURED = RESULTS / "measured"
OUT = (
    Path() if RESULTS == PACKAGED else RESULTS
)  # for generated files; nothing is written into an installed package
T = TypeVar("T")
Json = Any  # None, bool, int, float, str, and lists and dicts of them


def need_checkout(command: str, instead: str = "") -> None:
    """Raise `Error` where this program is an installed package."""
    if RESULTS == PACKAGED:
        raise Error(
            f"{command} needs a checkout of the repository: run 'python -m reproduce {command}' there{instead}"
        )


def find_record(name: str) -> Path:
    """Return the path `name`; if it does not exist, the record of that name in `runs` or `results/measured`."""
    path = Path(name)
    named = [
        folder / f"{name.removesuffix('.json')}.json"
        for folder in (RUNS, MEASURED)
        if path.name == name
    ]
    return next((each for each in (path, *named) if each.exists()), path)


def read_json(path: Path) -> Json:
    """Read the JSON file at `path`, or raise `Error` if it cannot be read, or is not JSON."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Error(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> Json:
    """Parse the content of the file `where`, or raise `Error` if it is not JSON, which has no NaN or infinity."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Error(
            f"{where}: not JSON: {str(error).removeprefix('JSON is malformed: ')}"
        ) from error


def decode(kind: type[T], data: Json, where: str) -> T:
    """Convert parsed JSON to the type `kind` by msgspec.

    If something does not fit, it raises `Error`, which names the file, `where`, and the place, as in
    `results[3].status`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise Error(": ".join(filter(None, (where, place.strip(".`"), what)))) from error
