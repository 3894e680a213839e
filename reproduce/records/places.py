"""Say where records are: a run's own in `runs`, those that were published from it in `results/measured`."""

from __future__ import annotations

from pathlib import Path

from reproduce.machine.description import ROOT

__all__ = ["MEASURED", "RESULTS", "RUNS", "find_record"]

RUNS = Path("runs")  # in the current folder; git ignores it
PACKAGED = Path(__file__).parents[1] / "results"  # in a wheel
RESULTS = PACKAGED if PACKAGED.is_dir() else ROOT / "results"
MEASURED = RESULTS / "measured"


def find_record(name: str) -> Path:
    """Return the path `name`, or, where there is none, the record in `runs` or `results/measured` that is called so."""
    path = Path(name)
    named = [folder / f"{name.removesuffix('.json')}.json" for folder in (RUNS, MEASURED) if path.name == name]
    return next((each for each in (path, *named) if each.exists()), path)
