"""Say where records are: a run's own in `runs`, those that were published from it in `results/measured`."""

from __future__ import annotations

from pathlib import Path

from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT

RUNS = Path("runs")  # in the current folder; git ignores it
PACKAGED = Path(__file__).parents[1] / "results"  # in a wheel
RESULTS = PACKAGED if PACKAGED.is_dir() else ROOT / "results"
MEASURED = RESULTS / "measured"
OUT = Path() if RESULTS == PACKAGED else RESULTS  # for what is made from records: an installed package stays as it is


def need_checkout(command: str) -> None:
    """Raise `Error` where this program is an installed package."""
    if RESULTS == PACKAGED:
        raise Error(f"{command} needs a checkout of the repository: run 'python -m reproduce {command}' there", USAGE)


def find_record(name: str) -> Path:
    """Return the path `name`, or, where there is none, the record in `runs` or `results/measured` that is called so."""
    path = Path(name)
    named = [folder / f"{name.removesuffix('.json')}.json" for folder in (RUNS, MEASURED) if path.name == name]
    return next((each for each in (path, *named) if each.exists()), path)
