"""Make the two tables of an accuracy experiment.

The first table has the measured and published top-1 errors, and says whether a pipeline reaches the
error of its baseline. The second table shows how the rows (configurations) were trained: the batch
size, the number of micro-batches, the throughput and so on.
"""

from collections.abc import Iterable, Mapping, Sequence

from reproduce.experiments.row import Experiment
from reproduce.numbers.accuracy import FinalError, final_error, final_errors
from reproduce.numbers.metrics import epoch_throughput, outcome
from reproduce.records.places import Json
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, by_value, number, span
from reproduce.tables.rows import ROW, Rows, config

RUNNING_STATISTICS = (  # of records up to revision 414bf55
    "running statistics: largest relative difference, over all seeds and layers, of batch norm's "
    "running mean or variance from what torch's batch norm, in the last epoch, made of the same "
    "values in undivided mini-batches; where deferred, rounding should be all there is"
)
Pair = tuple[FinalError, FinalError]  # the errors of a row and of its baseline
Notes = list[str | None]


def accuracy_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return two tables of an accuracy experiment: the rows' errors, and the rows' trainings."""
    rows = Rows(experiment, results)
    return [_reached(rows), _trained(rows)]


def _reached(rows: Rows) -> Table:
    def pair(result: Result) -> Pair | None:
        base = rows.named(result.over)
        ours = final_error(result)
        theirs = None if base is None else final_error(base)
        if ours is None or theirs is None:
            return None
        return ours, theirs

    def over_base(both: Pair) -> float:
        ours, theirs = both
        return ours.mean - theirs.mean

    def spread(both: Pair) -> float | None:
        ours, theirs = both
        return ours.allowed(theirs)

    def verdict(both: Pair) -> str:
        ours, theirs = both
        return ours.verdict(theirs)

    def published(result: Result) -> object:
        paper = rows.paper(result)
        if paper is None:
            return None
        return final_error(paper) or paper.config.get("outcome")

    columns = [
        ROW,
        Column("top-1 error\n%", _error_or_progress),
        Column("over\nbase", over_base, "{:+.2f}").of(pair),
        Column("spread", spread, "{:.2f}").of(pair),
        Column("verdict", verdict).of(pair),
        Column("published\n%", published),
    ]
    return rows.table("", columns, _notes(rows))


def _notes(rows: Rows) -> Notes:
    """Return the notes below the table of top-1 errors.

    The notes give the settings of the trainings, and say what the columns mean.
    """
    seeds = []
    baselines = {}
    for result in rows:
        if result.samples:
            seeds.append(len(final_errors(result)))
        if result.over:
            baselines[result.row] = result.over
    trained = "no training came to its end"
    if any(seeds):
        plural = "" if set(seeds) == {1} else "s"
        trained = f"mean +- standard deviation over {span(seeds)} seed{plural}"
    scale = rows.results[0].scale
    work = f"{_trainings(rows.configs)}, {rows.span('epochs')} epochs"
    notes: Notes = [f"scale {scale}: {work}; {trained}"]
    over = by_value(baselines)
    base = next(iter(over), "the first row")
    if len(over) > 1:
        bases = "; ".join(f"{base} for {own}" for base, own in over.items())
        base = f"the row to equal ({bases})"
    notes.append(f"over base: less the error of {base}")
    notes.append(
        "same: no further apart than both deviations together (spread), so that mean +- deviation "
        "of both overlap"
    )
    if 1 in seeds:
        notes.append("one seed has no spread, and so no verdict: train more by --seeds K")
    source = rows.publication.source or {}
    papers = [result.config for result in rows.publication.results]
    notes.append(
        f"published: {source.get('repo')}, {_trainings(papers)}, {rows.published_on}; "
        f"reference rows by {source.get('reference')}"
    )
    notes += rows.problems()
    return notes


def _error_or_progress(result: Result) -> object:
    """Return what the table shows as the error of a row (a training configuration).

    This is the error after the last epoch. If the training has not got there, it is the number of
    the epoch that it has reached. If the training has failed, or has run no epoch, it is the row's
    status, such as "failed".
    """
    error = final_error(result)
    if error is not None:
        return error
    epochs = result.samples.get("epoch")
    if result.status == "measured" and epochs:
        return f"epoch {epochs[-1]:.0f} of {result.config['epochs']}"
    return outcome(result)


def _trainings(configs: Iterable[Mapping[str, Json]]) -> str:
    """Return a text with each trained model and its dataset, such as `resnet101 on ImageNet`."""
    trainings = set()
    for each in configs:
        if "dataset" in each:
            trainings.add(f"{each['model']} on {each['dataset']}")
    return ", ".join(sorted(trainings))


def _trained(rows: Rows) -> Table:
    def micro_batches(result: Result) -> object:
        if result.config["partitions"] is None:
            return "-"
        return result.config["chunks"]

    def batch_norm(result: Result) -> str:
        return "deferred" if result.config["deferred_batch_norm"] else "plain"

    def samples_per_second(result: Result) -> str | None:
        samples = epoch_throughput(result)
        return None if samples is None else number(samples)

    def difference(result: Result) -> str | None:
        of_seeds = result.values.get("running_statistics_difference")
        return f"{max(of_seeds):.0e}" if of_seeds else None

    columns = [
        ROW,
        config("batch", "batch_size"),
        config("n", "gpus"),
        Column("m", micro_batches),
        Column("batch\nnorm", batch_norm),
        Column("samples/s", samples_per_second),
        Column("published", rows.published_throughput, number),
        Column("running\nstatistics", difference),
    ]
    notes: Notes = [
        "samples/s: median over epochs, reading data included, evaluation not",
        "batch norm: deferred keeps running statistics of mini-batches, plain of what it sees, "
        "micro-batches or shares",
    ]
    if any(difference(result) for result in rows):
        notes.append(RUNNING_STATISTICS)
    return rows.table(": how they were trained", columns, notes)
