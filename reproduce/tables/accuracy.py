"""Make the accuracy tables: top-1 error beside the published, and whether a pipeline reaches what it is to equal.

A row's error is that after its last epoch: mean and standard deviation over the seeds that were trained to the end. Two
rows reach the same accuracy where mean +- standard deviation of the one overlaps that of the other, that is where the
means differ by no more than the sum of the deviations.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reproduce.experiments import Experiment
from reproduce.records.decode import Json
from reproduce.records.published import published
from reproduce.records.record import Result
from reproduce.tables.layout import Table, failures, many, span

__all__ = ["Error", "accuracy_tables", "compare", "final_error"]

Results = Mapping[str, Result]  # by row


class Error(NamedTuple):
    """Hold top-1 errors in %: mean, and standard deviation where there is more than one."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" +- {self.deviation:.2f}")


class Comparison(NamedTuple):
    """Hold how far two errors are from each other, and how far they may be; None where nothing tells."""

    difference: float
    allowed: float | None

    @property
    def verdict(self) -> str:
        """Say whether the two are the same within their spreads."""
        return "" if self.allowed is None else "same" if abs(self.difference) <= self.allowed else "differs"


def accuracy_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table of what the rows have reached, and one of how they were trained."""
    rows = {result.row: result for result in results}
    papers = {result.row: result for result in published(experiment.table).results}
    return [_reached(experiment, rows, papers), _trained(experiment, rows, papers)]


def final_errors(result: Result) -> list[float]:
    """Return the error after the last epoch, for every seed that was trained to the end."""
    last = result.config["epochs"]
    pairs = zip(result.samples.get("epoch", []), result.samples.get("top1_error", []), strict=True)
    return [error for epoch, error in pairs if epoch == last]


def final_error(result: Result) -> Error | None:
    """Return mean and sample standard deviation over the seeds; None where no training came to its end."""
    errors = final_errors(result)
    if not errors:
        return None
    return Error(statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else None)


def compare(found: Error, expected: Error) -> Comparison:
    """Compare two errors; without a deviation of each there is nothing to judge the difference by."""
    known = found.deviation is not None and expected.deviation is not None
    allowed = (found.deviation or 0.0) + (expected.deviation or 0.0) if known else None
    return Comparison(found.mean - expected.mean, allowed)


def _reached(experiment: Experiment, results: Results, papers: Results) -> Table:
    rows = []
    for result in results.values():
        error, over = final_error(result), results.get(result.over or "")
        base = None if over is None else final_error(over)
        paper = _paper(result, papers)
        found = None if error is None or base is None else compare(error, base)
        rows.append(
            [
                result.row,
                _outcome(result) if error is None else str(error),
                "" if found is None else f"{found.difference:+.2f}",
                "" if found is None or found.allowed is None else f"{found.allowed:.2f}",
                "" if found is None else found.verdict,
                "" if paper is None else _paper_error(paper),
            ]
        )
    headings = ["row", "top-1 error\n%", "over\nbase", "spread", "verdict", "published\n%"]
    return Table(experiment.title, headings, rows, [*_circumstances(results), *_notes(experiment, results, papers)])


def _trained(experiment: Experiment, results: Results, papers: Results) -> Table:
    rows = []
    compared = any(result.scale == "paper" for result in results.values())  # the speed of another model tells nothing
    for result in results.values():
        config = result.config
        differences = result.values.get("running_statistics_difference")
        plain = config["partitions"] is None
        rows.append(
            [
                result.row,
                str(config["batch_size"]),
                str(config["gpus"]),
                "-" if plain else str(config["chunks"]),
                "deferred" if config["deferred_batch_norm"] else "plain",
                _throughput(result),
                *([_paper_throughput(_paper(result, papers))] if compared else []),
                f"{max(differences):.0e}" if differences else "",
            ]
        )
    headings = ["row", "batch", "n", "m", "batch\nnorm", "samples/s", *(["published"] if compared else []),
                "running\nstatistics"]  # fmt: skip
    notes = [
        "samples/s: median over epochs, reading data included, evaluation not",
        "batch norm: deferred keeps running statistics of mini-batches, plain of what it sees, micro-batches or shares",
    ]
    if any("running_statistics_difference" in result.values for result in results.values()):
        notes.append(
            "running statistics: largest relative difference, over all seeds and layers, of batch norm's running mean "
            "or variance from what torch's batch norm, in the last epoch, made of the same values in undivided "
            "mini-batches; where deferred, rounding should be all there is"
        )
    return Table(f"{experiment.title}: how they were trained", headings, rows, notes)


def _circumstances(results: Results) -> list[str]:
    configs = [result.config for result in results.values()]
    seeds = [len(final_errors(result)) for result in results.values() if result.samples]
    size = {(str(config["model"]), str(config["dataset"])) for config in configs}
    named = ", ".join(f"{model} on {data}" for model, data in sorted(size))
    epochs = span([config["epochs"] for config in configs])
    return [
        f"scale {next(iter(results.values())).scale}: {named}, {epochs} epochs; "
        + (f"mean +- standard deviation over {many_seeds(seeds)}" if any(seeds) else "no training came to its end")
    ]


def many_seeds(counts: Sequence[int]) -> str:
    """Return `5 seeds`, or `1 to 5 seeds` where rows have had different numbers of them."""
    return many(counts[0], "seed") if len({*counts}) == 1 else f"{span(counts)} seeds"


def _notes(experiment: Experiment, results: Results, papers: Results) -> list[str]:
    bases = {result.row: result.over for result in results.values() if result.over}
    over = "; ".join(
        f"{base} for {', '.join(row for row, other in bases.items() if other == base)}"
        for base in dict.fromkeys(bases.values())
    )
    notes = [f"over base: less the error of the row to equal ({over})" if len({*bases.values()}) > 1 else
             f"over base: less the error of {next(iter(bases.values()), 'the first row')}"]  # fmt: skip
    notes.append(
        "same: no further apart than both deviations together (spread), so that mean +- deviation of both overlap"
    )
    lone = [result.row for result in results.values() if len(final_errors(result)) == 1]
    if lone:
        notes.append("one seed has no spread, and so no verdict: train more by --seeds K")
    notes += [_about_publication(experiment, papers)]
    notes += failures([(each.row, str(each.reason)) for each in results.values() if each.status == "failed"])
    lacking = sum(result.status == "needs devices" for result in results.values())
    return [*notes, f"{many(lacking, 'row')} not run for want of devices"] if lacking else notes


def _about_publication(experiment: Experiment, papers: Results) -> str:
    table = published(experiment.table)
    source, hardware = table.source or {}, table.hardware or {}
    models = sorted({f"{row.config['model']} on {row.config['dataset']}" for row in papers.values()
                     if "dataset" in row.config})  # fmt: skip
    return (
        f"published: {source.get('repo')}, {', '.join(models)}, {hardware.get('num_gpus')} x {hardware.get('gpu')}; "
        f"reference rows by {source.get('reference')}"
    )


def _outcome(result: Result) -> str:
    if result.status == "needs devices":
        return str(result.reason)
    done = result.samples.get("epoch", [])
    if result.status == "measured" and done:
        return f"epoch {done[-1]:.0f} of {result.config['epochs']}"
    return result.status


def _paper(result: Result, papers: Results) -> Result | None:
    return papers.get((result.published or "").rpartition("/")[2])


def _paper_error(paper: Result) -> str:
    error = paper.values["top1_error"]
    if error is None:
        return str(paper.config.get("outcome", ""))
    return str(Error(error, paper.values["top1_error_spread"]))


def _throughput(result: Result) -> str:
    times = result.samples.get("epoch_time")
    if not times:
        return ""
    return _three_digits(result.values["samples_per_epoch"] / statistics.median(times))


def _paper_throughput(paper: Result | None) -> str:
    value: Json = None if paper is None else paper.values["throughput"]
    return "" if value is None else _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
