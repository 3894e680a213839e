"""Make the tables on the pages about prediction, from records in results/predicted and from research/p40/fit.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reproduce.error import Error
from reproduce.predict.older import OLDER
from reproduce.records.decode import Json, read_json
from reproduce.records.published import published
from reproduce.records.record import load
from reproduce.tables.layout import Table
from reproduce.tables.predicted import speed_up_errors, throughput_errors


def prediction_block(root: Path, name: str) -> str:
    """Return the table `name` of the checkout at `root` as Markdown, without its heading.

    Raises:
        Error: there is no such table.
    """
    if name not in BLOCKS:
        raise Error(f"a block is from predicted/{name}; after the slash name one of {', '.join(BLOCKS)}")
    _, _, below = BLOCKS[name](root).markdown().partition("\n\n")  # the page has headings of its own
    return f"\n{below.strip()}\n\n"


def _models(root: Path) -> Table:
    """Return the model and those that it is compared with: errors in rows of older versions, and in today's."""
    models = _fit(root)["models"]
    headings = ["model", "constants\nfitted"]
    for which in ("older rows", "today's rows"):
        headings += [f"{which}:\nsamples/s", "speed-ups", "within 10%"]
    rows = []
    for name, model in models.items():
        row = [name, str(model["fitted"])]
        for which in (model["history"], model["today"]):
            throughput, speed_up = which.get("throughput"), which["speed-up"]
            within = f"{speed_up['within 10%']} of {speed_up['rows']}"
            row += [_sizes(throughput) if throughput else "", _sizes(speed_up), within]
        rows.append(row)
    now = models["this model"]["today"]["speed-up"]
    notes = [
        "errors: the median, and in brackets the largest; within 10%: speed-ups over each table's first row",
        f"the targets for today's speed-ups: a median of 3% (reached: {now['median']:.2%}), and nine of ten within 10% "
        f"(reached: {now['within 10%'] / now['rows']:.0%})",
    ]
    return Table("Errors of predictions in published rows", headings, rows, notes)


def _history(root: Path) -> Table:
    rows = []
    for name, older in OLDER.items():
        record = load(root / "results" / "predicted" / f"{name}-p40x8.json")
        papers = {result.row: result.values["throughput"] for result in published(older.table).results}
        off, speed_ups = throughput_errors(record), speed_up_errors(record)
        for result in record.results:
            error = f"{speed_ups[result.row]:+.1%}" if result.row in speed_ups else ""
            numbers = f"{papers[result.row]:.1f}", f"{result.values['throughput']:.1f}", f"{off[result.row]:+.1%}"
            rows.append([f"{name} {result.row}", *numbers, error])
    headings = ["row", "samples/s published", "predicted", "error", "error of the speed-up"]
    return Table("Rows of older versions", headings, rows)


def _timings(root: Path) -> Table:
    rows = []
    for timing in _fit(root)["timings"]:
        errors = " ".join(f"{error:+.0%}" for error in timing["errors"])
        rows.append([timing["source"], timing["model"], " ".join(f"{ms:g}" for ms in timing["ms"]), errors])
    return Table("Timings", ["source", "model", "ms, published", "error"], rows, left=2)


def _held_out(root: Path) -> Table:
    rows = [
        [name, f"{fit['compute']:.2f}", f"{fit['memory']:.2f}", f"{fit['timings']:.1%}",
         _sizes(fit["history"]["throughput"])]
        for name, fit in _fit(root)["held out"].items()
    ]  # fmt: skip
    headings = ["left out", "compute", "memory", "root mean square of its own errors", "older rows: samples/s"]
    return Table("Held out", headings, rows)


def _sizes(errors: Json) -> str:
    return f"{errors['median']:.1%} ({errors['largest']:.0%})"


def _fit(root: Path) -> Json:
    return read_json(root / "research" / "p40" / "fit.json")


BLOCKS: dict[str, Callable[[Path], Table]] = {
    "models": _models,
    "history": _history,
    "fit": _timings,
    "held out": _held_out,
}
