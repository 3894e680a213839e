"""Make the accuracy tables: top-1 error, the published one, and whether a pipeline matches its baseline."""

from collections.abc import Iterable, Mapping, Sequence

from reproduce.experiments.row import Experiment
from reproduce.numbers.metrics import (
    FinalError,
    epoch_throughput,
    final_error,
    final_errors,
    outcome,
)
from reproduce.records.places import Json
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, by_value, number, span
from reproduce.tables.rows import ROW, Rows, config

RUNNING_STATISTICS = (  # of records up to revision 414bf55
    "running statistics: largest relative difference, over all seeds and layers, of batch norm's running mean or "
    "variance from what torch's batch norm, in the last epoch, made of the same values in undivided mini-batches; "
    "where deferred, rounding should be all there is"
)
Both = tuple[FinalError, FinalError]


def accuracy_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table of the rows' errors, and one of how they were trained."""
    rows = Rows(experiment, results)
    return [_reached(rows), _trained(rows)]


def _reached(rows: Rows) -> Table:
    def both(result: Result) -> Both | None:
        """Return the errors of a row and of its baseline."""
        base = rows.named(result.over)
        ours, theirs = final_error(result), None if base is None else final_error(base)
        return None if ours is None or theirs is None else (ours, theirs)

    def published(result: Result) -> object:
        paper = rows.paper(result)
        return None if paper is None else final_error(paper) or paper.config.get("outcome")

    columns = [
        ROW,
        Column("top-1 error\n%", lambda result: final_error(result) or _how_far(result)),
        Column[Both]("over\nbase", lambda both: both[0].mean - both[1].mean, "{:+.2f}").of(both),
        Column[Both]("spread", lambda both: both[0].allowed(both[1]), "{:.2f}").of(both),
        Column[Both]("verdict", lambda both: both[0].verdict(both[1])).of(both),
        Column("published\n%", published),
    ]
    configs = [result.config for result in rows]
    seeds = [len(final_errors(result)) for result in rows if result.samples] or [0]
    over = by_value({result.row: result.over for result in rows if result.over})
    bases = "; ".join(f"{base} for {own}" for base, own in over.items())
    source, papers = (
        rows.publication.source or {},
        [result.config for result in rows.publication.results],
    )
    notes = [
        f"scale {rows.results[0].scale}: {_trainings(configs)}, {span([each['epochs'] for each in configs])} epochs; "
        + (
            f"mean +- standard deviation over {span(seeds)} seed{'' if {*seeds} == {1} else 's'}"
            if any(seeds)
            else "no training came to its end"
        ),
        "over base: less the error of "
        + (f"the row to equal ({bases})" if len(over) > 1 else next(iter(over), "the first row")),
        "same: no further apart than both deviations together (spread), so that mean +- deviation of both overlap",
        "one seed has no spread, and so no verdict: train more by --seeds K"
        if 1 in seeds
        else None,
        f"published: {source.get('repo')}, {_trainings(papers)}, {rows.published_on}; "
        f"reference rows by {source.get('reference')}",
        *rows.problems(),
    ]
    return rows.table("", columns, notes)


def _how_far(result: Result) -> str:
    epochs = result.samples.get("epoch")
    if result.status == "measured" and epochs:
        return f"epoch {epochs[-1]:.0f} of {result.config['epochs']}"
    return outcome(result)


def _trainings(configs: Iterable[Mapping[str, Json]]) -> str:
    return ", ".join(
        sorted({f"{each['model']} on {each['dataset']}" for each in configs if "dataset" in each})
    )


def _trained(rows: Rows) -> Table:
    def difference(result: Result) -> str | None:
        each = result.values.get("running_statistics_difference")
        return f"{max(each):.0e}" if each else None

    columns = [
        ROW,
        config("batch", "batch_size"),
        config("n", "gpus"),
        Column(
            "m", lambda each: "-" if each.config["partitions"] is None else each.config["chunks"]
        ),
        Column(
            "batch\nnorm",
            lambda each: "deferred" if each.config["deferred_batch_norm"] else "plain",
        ),
        Column("samples/s", lambda each: (samples := epoch_throughput(each)) and number(samples)),
        Column("published", rows.published_throughput, number),
        Column("running\nstatistics", difference),
    ]
    notes = [
        "samples/s: median over epochs, reading data included, evaluation not",
        "batch norm: deferred keeps running statistics of mini-batches, plain of what it sees, micro-batches or shares",
        RUNNING_STATISTICS if any(map(difference, rows)) else None,
    ]
    return rows.table(": how they were trained", columns, notes)
