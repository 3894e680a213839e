"""Make the league's table, which shows how far predictions are from published numbers.

The league has tables of training speeds that other projects have published. For each published
speed, this library makes a prediction.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from reproduce.error import Error
from reproduce.numbers.metrics import errors, speed_ups, throughputs
from reproduce.records.places import RESULTS
from reproduce.records.record import Record, load
from reproduce.tables.layout import grid

FOLDER = RESULTS / "league"
PREDICTED = "-predicted"
HEAD = [
    "table",
    "rows",
    "samples/s: median error",
    "largest",
    "speed-ups",
    "median error",
    "within 10%",
]


def published_paths() -> list[Path]:
    """Return the files of the published tables."""
    return [path for path in sorted(FOLDER.glob("*.json")) if not path.stem.endswith(PREDICTED)]


def predicted_path(published: Path) -> Path:
    """Return the path of the file with the predictions of a published table."""
    return published.with_name(f"{published.stem}{PREDICTED}.json")


def table(style: str) -> str:
    """Return the table of predicted and published speeds, with a row for each publication.

    Raises:
        Error: If there is no prediction for a published table, or for one of its rows.
    """
    rows = []
    all_speeds: list[float] = []
    all_ratios: list[float] = []
    for path in published_paths():
        published = load(path)
        speeds, ratios = differences(published, load(predicted_path(path)))
        rows.append(row(published.title, speeds, ratios))
        all_speeds += speeds
        all_ratios += ratios
    rows.append(row("all", all_speeds, all_ratios))
    return grid(HEAD, rows, style, left=1)


def differences(published: Record, predicted: Record) -> tuple[list[float], list[float]]:
    """Return the absolute relative errors of predicted samples/s, and of predicted speed-ups.

    The speed-up of a row is its speed divided by the speed of its baseline, which is the row that
    the field `over` names.
    """
    theirs = throughputs(published.results)
    ours = throughputs(predicted.results)
    if theirs.keys() != ours.keys():
        raise Error(f"{predicted.name} has other rows: run 'python -m benchmarks.league'")
    off = errors(ours, theirs)
    off_speed_up = errors(speed_ups_over(predicted), speed_ups_over(published))
    return absolute(off), absolute(off_speed_up)


def absolute(numbers: dict[str, float]) -> list[float]:
    return [abs(number) for number in numbers.values()]


def speed_ups_over(record: Record) -> dict[str, float]:
    """Return the speed-up of each row that names a baseline (another row) in its field `over`."""
    found: dict[str, float] = {}
    for base in record.results:
        others = [result for result in record.results if result.over == base.row]
        found.update(speed_ups(others, base))
    return found


def row(title: str, speeds: Sequence[float], ratios: Sequence[float]) -> list[str]:
    """Return the texts of all cells in a row of the league's table.

    Args:
        title: The first cell.
        speeds: The absolute relative errors of the predicted speeds.
        ratios: The absolute relative errors of the predicted speed-ups.
    """
    cells = [title, str(len(speeds)), f"{median(speeds):.1%}", f"{max(speeds):.1%}"]
    if not ratios:
        return [*cells, "0", "", ""]
    close = sum(ratio <= 0.1 for ratio in ratios)
    return [*cells, str(len(ratios)), f"{median(ratios):.1%}", f"{close} of {len(ratios)}"]
