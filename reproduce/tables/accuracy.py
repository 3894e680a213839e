"""Make the accuracy tables: top-1 error beside the published, and whether a pipeline reaches what it is to equal."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import Experiment
from reproduce.numbers.accuracy import final_error, final_errors
from reproduce.numbers.metrics import epoch_throughput, outcome
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, many, span, table
from reproduce.tables.rows import ROW, Rows, config, problems
from reproduce.tables.text import number

__all__ = ["accuracy_tables"]

RUNNING_STATISTICS = (
    "running statistics: largest relative difference, over all seeds and layers, of batch norm's running mean or "
    "variance from what torch's batch norm, in the last epoch, made of the same values in undivided mini-batches; "
    "where deferred, rounding should be all there is"
)


def accuracy_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table of what the rows have reached, and one of how they were trained."""
    rows = Rows(experiment, results)
    return [_reached(rows), _trained(rows)]


def _reached(rows: Rows) -> Table:
    def error(result: Result) -> str:
        return str(final_error(result) or _how_far(result))

    def over_base(result: Result) -> list[str]:
        """Return the cells that compare a row with the one that it is to equal."""
        ours = final_error(result)
        base = rows.base(result)
        theirs = None if base is None else final_error(base)
        if ours is None or theirs is None:
            return ["", "", ""]
        allowed = ours.allowed(theirs)
        return [f"{ours.mean - theirs.mean:+.2f}", "" if allowed is None else f"{allowed:.2f}", ours.verdict(theirs)]

    def published(result: Result) -> str:
        paper = rows.paper(result)
        return "" if paper is None else str(final_error(paper) or paper.config.get("outcome", ""))

    columns = [
        ROW,
        Column("top-1 error\n%", error),
        Column("over\nbase", lambda result: over_base(result)[0]),
        Column("spread", lambda result: over_base(result)[1]),
        Column("verdict", lambda result: over_base(result)[2]),
        Column("published\n%", published),
    ]
    return table(rows.experiment.title, columns, rows, _notes(rows))


def _trained(rows: Rows) -> Table:
    def speed(result: Result) -> str:
        samples = epoch_throughput(result)
        return "" if samples is None else number(samples)

    def difference(result: Result) -> str:
        each = result.values.get("running_statistics_difference")
        return f"{max(each):.0e}" if each else ""

    columns = [
        ROW,
        config("batch", "batch_size"),
        config("n", "gpus"),
        Column[Result]("m", lambda each: "-" if each.config["partitions"] is None else str(each.config["chunks"])),
        Column[Result]("batch\nnorm", lambda each: "deferred" if each.config["deferred_batch_norm"] else "plain"),
        Column("samples/s", speed),
        Column("published", rows.published_throughput),
        Column("running\nstatistics", difference),
    ]
    notes = [
        "samples/s: median over epochs, reading data included, evaluation not",
        "batch norm: deferred keeps running statistics of mini-batches, plain of what it sees, micro-batches or shares",
        *([RUNNING_STATISTICS] if any(map(difference, rows)) else []),
    ]
    return table(f"{rows.experiment.title}: how they were trained", columns, rows, notes)


def _how_far(result: Result) -> str:
    epochs = result.samples.get("epoch")
    if result.status == "measured" and epochs:
        return f"epoch {epochs[-1]:.0f} of {result.config['epochs']}"
    return outcome(result)


def _notes(rows: Rows) -> list[str]:
    configs = [result.config for result in rows]
    models = ", ".join(sorted({f"{each['model']} on {each['dataset']}" for each in configs}))
    counts = [len(final_errors(result)) for result in rows if result.samples]
    seeds = many(counts[0], "seed") if len({*counts}) == 1 else f"{span(counts or [0])} seeds"
    over = {result.over: [each.row for each in rows if each.over == result.over] for result in rows if result.over}
    bases = "; ".join(f"{base} for {', '.join(own)}" for base, own in over.items())
    notes = [
        f"scale {rows.results[0].scale}: {models}, {span([each['epochs'] for each in configs])} epochs; "
        + (f"mean +- standard deviation over {seeds}" if any(counts) else "no training came to its end"),
        "over base: less the error of "
        + (f"the row to equal ({bases})" if len(over) > 1 else next(iter(over), "the first row")),
        "same: no further apart than both deviations together (spread), so that mean +- deviation of both overlap",
        *(["one seed has no spread, and so no verdict: train more by --seeds K"] if 1 in counts else []),
        _about_publication(rows),
    ]
    return notes + problems(rows)


def _about_publication(rows: Rows) -> str:
    source, hardware = rows.publication.source or {}, rows.publication.hardware or {}
    configs = [result.config for result in rows.publication.results]
    models = sorted({f"{each['model']} on {each['dataset']}" for each in configs if "dataset" in each})
    return (
        f"published: {source.get('repo')}, {', '.join(models)}, {hardware.get('num_gpus')} x {hardware.get('gpu')}; "
        f"reference rows by {source.get('reference')}"
    )
