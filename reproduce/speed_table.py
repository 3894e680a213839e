"""Make the speed table: throughput and speed-up over the row that each is compared with, measured and published."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reproduce.decode import Json
from reproduce.experiments import Experiment
from reproduce.layout import Table
from reproduce.paper import published
from reproduce.record import Result
from reproduce.statistic import Spread, speed_up, spread, throughput

__all__ = ["speed_tables"]

Row = Sequence[str]


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the experiment's speed table."""
    by_row = {result.row: result for result in results}
    ours_first = experiment.table
    papers = {result.row: result for result in published(experiment.table).results}
    first = next(iter(papers))

    rows = []
    for result in results:
        over = by_row.get(result.over or "")
        paper = papers.get((result.published or "").rpartition("/")[2])
        paper_over = None if over is None else papers.get((over.published or "").rpartition("/")[2])
        rows.append(
            [
                result.config["configuration"],
                _count(result.config["partitions"]),
                _count(result.config["chunks"]),
                _throughput(result),
                _speed_up(result, over),
                _published_ratio(paper, paper_over),
                _published_ratio(paper, papers[first]),
            ]
        )
    headings = [
        "configuration",
        "n",
        "m",
        "samples/s\n(quartiles)",
        "speed-up\n(quartiles)",
        "published\nover m=1",
        f"published\nover {first}",
    ]
    del ours_first
    title = f"{experiment.title}, scale {results[0].scale}"
    return [Table(title, headings, rows, _notes(experiment, results), left=1)]


def _notes(experiment: Experiment, results: Sequence[Result]) -> list[str]:
    paper = published(experiment.table)
    del paper, results
    return []


def _count(value: Json) -> str:
    return "-" if value is None else str(value)


def _throughput(result: Result) -> str:
    found = throughput(result)
    return result.reason or result.status if found is None else _write(found, _three_digits)


def _speed_up(result: Result, over: Result | None) -> str:
    found = None if over is None else speed_up(result, over)
    if found is None:
        return ""
    return "1" if result is over else _write(found, "{:.2f}".format)


def _published_ratio(row: Result | None, over: Result | None) -> str:
    if row is None or over is None:
        return ""
    return f"{row.values['throughput'] / over.values['throughput']:.2f}"


def _write(value: Spread, number: Callable[[float], str]) -> str:
    if value.low is None or value.high is None:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)}-{number(value.high)})"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


_ = spread
