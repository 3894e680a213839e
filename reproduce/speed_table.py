"""Make the speed tables: throughput, and speed-up over the row that each is compared with, beside the published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reproduce.decode import Json
from reproduce.experiments import AS_PUBLISHED, Experiment
from reproduce.layout import Table, failures, many, span
from reproduce.paper import published
from reproduce.record import Result
from reproduce.statistic import Spread, speed_up, throughput

__all__ = ["speed_tables"]

Results = Mapping[str, Result]  # by row


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table of the rows at equal batch size, and one of the rows that are as published."""
    papers = {result.row: result for result in published(experiment.table).results}
    equal = {result.row: result for result in results if result.config["configuration"] != AS_PUBLISHED}
    exact = {result.row: result for result in results if result.config["configuration"] == AS_PUBLISHED}
    tables = []
    if equal:
        tables.append(_at_equal_batch(experiment, equal, papers))
    if exact:
        tables.append(_as_published(experiment, exact, papers))
    return tables


def _at_equal_batch(experiment: Experiment, results: Results, papers: Results) -> Table:
    rows = []
    for result in results.values():
        over = results.get(result.over or "")
        paper = _paper(result, papers)
        rows.append(
            [
                result.config["configuration"],
                _count(result.config["partitions"]),
                _count(result.config["chunks"]),
                _throughput(result),
                _speed_up(result, over),
                _speed_up(result, results.get(result.over_published or ""), quartiles=False),
                _ratio(paper, None if over is None else _paper(over, papers)),
            ]
        )
    headings = [
        "configuration",
        "n",
        "m",
        "samples/s\n(quartiles)",
        "over naive\n(quartiles)",
        "over m=1,\nalways",
        "published\nlikewise",
    ]
    notes = [
        *_circumstances(results),
        *experiment.notes,
        *_about_publication(experiment, papers),
        *_problems(results),
    ]
    return Table(f"{experiment.title}, at equal batch size", headings, rows, notes)


def _as_published(experiment: Experiment, results: Results, papers: Results) -> Table:
    rows = []
    for result in results.values():
        over, paper = results.get(result.over or ""), _paper(result, papers)
        rows.append(
            [
                result.row,
                str(result.config["batch_size"]),
                str(result.config["checkpoint"]),
                _throughput(result),
                "" if paper is None else _three_digits(paper.values["throughput"]),
                _speed_up(result, over),
                _ratio(paper, None if over is None else _paper(over, papers)),
            ]
        )
    headings = [
        "row",
        "batch",
        "checkpoint",
        "samples/s\n(quartiles)",
        "published",
        "speed-up\n(quartiles)",
        "published",
    ]
    return Table(f"{experiment.title}, as published", headings, rows, [*_circumstances(results), *_problems(results)])


def _circumstances(results: Results) -> list[str]:
    configs = [result.config for result in results.values()]
    steps = [len(result.samples["step_time"]) for result in results.values() if "step_time" in result.samples]
    size = sorted({tuple(config.get(name) for name in ("L", "D") if name in config) for config in configs})
    parts = [
        f"scale {next(iter(results.values())).scale}: {configs[0]['model']} {', '.join(map(str, size))}",
        f"batch size {span([config['batch_size'] for config in configs])}",
        f"{span(steps)} timed steps per row" if steps else "no step timed",
    ]
    return ["; ".join(parts)]


def _about_publication(experiment: Experiment, papers: Results) -> list[str]:
    """Say what the published numbers are, and which of their conditions ours do not share."""
    table = published(experiment.table)
    source, hardware = table.source or {}, table.hardware or {}
    batches = [result.config["batch_size"] for result in papers.values()]
    bases = {result.config["checkpoint"] for result in papers.values() if result.config["chunks"] == 1}
    said = [f"published: {source.get('paper')}, on {hardware.get('num_gpus')} x {hardware.get('gpu')}"]
    if len(set(batches)) > 1:
        said.append(f"its batch size differs from row to row ({span(batches)}), so its speed-ups mix in larger batches")
    if bases == {"always"}:
        said.append("its m=1 rows recompute everything (checkpoint=always), which naive here does not")
    return ["; ".join(said)]


def _problems(results: Results) -> list[str]:
    failed = failures([(each.row, str(each.reason)) for each in results.values() if each.status == "failed"])
    lacking = [result for result in results.values() if result.status == "needs devices"]
    return [*failed, f"{many(len(lacking), 'row')} not run for want of devices"] if lacking else failed


def _paper(result: Result, papers: Results) -> Result | None:
    return papers.get((result.published or "").rpartition("/")[2])


def _count(value: Json) -> str:
    return "-" if value is None else str(value)


def _throughput(result: Result) -> str:
    found = throughput(result)
    if found is not None:
        return _write(found, _three_digits)
    return str(result.reason) if result.status == "needs devices" else result.status


def _speed_up(result: Result, over: Result | None, quartiles: bool = True) -> str:
    if result is over:
        return "1" if result.samples else ""
    found = None if over is None else speed_up(result, over)
    if found is None:
        return ""
    return _write(found if quartiles else Spread(found.median), "{:.2f}".format)


def _ratio(row: Result | None, over: Result | None) -> str:
    if row is None or over is None:
        return ""
    return f"{row.values['throughput'] / over.values['throughput']:.2f}"


def _write(value: Spread, number: Callable[[float], str]) -> str:
    if value.low is None or value.high is None:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)}-{number(value.high)})"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
