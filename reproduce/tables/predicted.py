"""Make the tables of predictions, with the published and the measured numbers of the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from reproduce.experiments.row import AS_PUBLISHED
from reproduce.numbers.metrics import MARK, errors, read, speed_ups, throughput
from reproduce.numbers.sources import Entry
from reproduce.predict.rows import SPEED_TABLES
from reproduce.records.places import MEASURED
from reproduce.records.published import published
from reproduce.records.record import Record, Result, Run, ranked, readable
from reproduce.tables.layout import Column, GiB, Table, by_value, in_lines, number, ratio, table
from reproduce.tables.rows import ROW, by_row
from torchgpipe.plan.planner import HERE

NOT_MEASURED = "not measured: no row of it was run at paper scale yet (results/measured)"


@dataclass(frozen=True)
class MeasuredRow:
    """Our measurement of a published row: samples per second of a median step, bytes allocated on all devices."""

    machine: str
    throughput: float | None = None
    allocated: float | None = None
    disturbed: bool = False


Measured = dict[str, MeasuredRow]  # by the published row's name


def measured_rows(experiment: str, folder: Path = MEASURED) -> Measured:
    """Return the measurement that is shown of each published row of the experiment, if there is one."""
    found: Measured = {}
    for record in reversed(ranked(readable(folder), experiment)):
        for result in record.results:
            if (
                result.experiment == experiment
                and record.run
                and (row := _measured(result, record.run)) is not None
            ):
                found[(result.published or "").rpartition("/")[2]] = row
    return found


def _measured(result: Result, run: Run) -> MeasuredRow | None:
    as_there = (result.status, result.scale, result.engine) == ("measured", "paper", "threads")
    if not as_there or not result.published or result.device == "meta":
        return None
    speed, peaks = throughput(result), result.values.get("peak_allocated")
    other = speed and result.config.get("configuration") != AS_PUBLISHED
    if other or not (speed or peaks):
        return None
    names = dict.fromkeys(gpu.name for gpu in run.machine.gpus[: run.devices])
    machine = f"{run.devices} x {', '.join(names)}" if run.device == "cuda" else run.machine.cpu
    return MeasuredRow(
        machine, speed.middle if speed else None, sum(peaks) if peaks else None, result.disturbed
    )


def predicted_tables(record: Record, measured: Measured) -> list[Table]:
    """Return the tables of a record of predictions: speed, memory or both, as in the published table.

    They also show what was `measured` of the same rows, or say that nothing was.
    """
    values = {name for result in record.results for name in result.values}
    makers = {"throughput": _speed, "allocated": _memory}
    return [make(record, measured) for value, make in makers.items() if value in values]


def beside_emulated(emulated: Record, predicted: Record) -> list[Table]:
    """Return a table for each experiment of a run, with emulated and predicted throughput of its rows."""
    name = _hardware(predicted)
    timed = "from the layers' times on this machine"
    how = timed if name == HERE else f"nothing run, from the hardware description {name}"
    made = []
    for experiment in dict.fromkeys(
        row.experiment for row in emulated.results if row.status == "emulated"
    ):
        rows = [
            row
            for row in emulated.results
            if row.status == "emulated" and row.experiment == experiment
        ]
        speeds = _throughputs(rows)
        foreseen = {
            each.row: each.values["throughput"]
            for each in predicted.results
            if each.experiment == experiment
        }
        ratios = {row: foreseen[row] / speed for row, speed in speeds.items()}
        columns = [
            ROW,
            Column("samples/s\nemulated", throughput, number),
            by_row("predicted", foreseen, number),
            by_row("predicted/\nemulated", ratios, ratio),
        ]
        off = [abs(each - 1) for each in ratios.values()]
        notes = [
            f"predicted: {how}; emulated: {emulated.name}",
            f"apart: median {median(off):.1%}, at most {max(off):.1%}; where they part, one of the two is wrong",
        ]
        made.append(table(f"{experiment}: emulated and predicted", columns, rows, notes))
    return made


def throughput_errors(record: Record) -> dict[str, float]:
    """Return the relative error of each predicted throughput against the published one."""
    return errors(_throughputs(_predicted(record)), _throughputs(_published(record).results))


def speed_up_errors(record: Record) -> dict[str, float]:
    """Return the relative error of each predicted speed-up against the published one.

    The baseline is the table's first row, which is left out.
    """
    first, *others = _predicted(record)
    return errors(speed_ups(others, first), _published_speed_ups(record, first.row))


def errors_table(records: Sequence[Record]) -> Table:
    """Return a table of the errors of speed predictions, for tables published for the same hardware."""
    chosen = [
        each
        for each in records
        if each.results[0].experiment in SPEED_TABLES and _same_hardware(each)
    ]
    speeds = [abs(error) for record in chosen for error in throughput_errors(record).values()]
    ratios = [abs(error) for record in chosen for error in speed_up_errors(record).values()]
    headings = [
        "rows of",
        "number",
        "samples/s:\nmedian error",
        "largest",
        "speed-ups:\nmedian error",
        "within 10%",
    ]
    percents = (
        [f"{error:.1%}" for error in (median(speeds), max(speeds), median(ratios))]
        if chosen
        else []
    )
    rows = (
        [["the papers' speed tables", str(len(speeds)), *percents, _within(ratios)]]
        if chosen
        else []
    )
    return Table("How far predictions are from what was published", headings, rows)


def _speed(record: Record, measured: Measured) -> Table:
    papers, same = (
        {paper.row: paper for paper in _published(record).results},
        _same_hardware(record),
    )
    first, *_ = predicted = _predicted(record)
    theirs = _published_speed_ups(record, first.row)
    off, off_speed_up = throughput_errors(record), speed_up_errors(record)
    run = {name: row for name, row in measured.items() if row.throughput is not None}
    machines = by_value({name: row.machine for name, row in run.items()})
    columns = [
        ROW,
        Column(
            "samples/s\npublished", lambda each: papers[each.row].values["throughput"], "{:.1f}"
        ),
        Column(
            "predicted",
            lambda each: each.values["throughput"] if each.row in off else each.status,
            "{:.1f}",
        ),
        by_row(
            "error", off if same else {}, "{:+.0%}"
        ),  # on other hardware, a difference is no error
        by_row("speed-up\npublished", {r.row: theirs[r.row] for r in predicted}, "{:.2f}"),
        by_row("predicted", speed_ups(predicted, first), "{:.2f}"),
        by_row("error", off_speed_up if same else {}, "{:+.1%}"),
        by_row(
            "measured",
            {x: f"{row.throughput:.1f}{MARK * row.disturbed}" for x, row in run.items()},
            "",
            "not run",
        ),
    ]
    far, apart = ([abs(x) for x in each.values()] for each in (off, off_speed_up))
    epochs = any("last_batch_size" in result.config for result in record.results)
    notes = [
        f"predicted, not measured, from the hardware description {_hardware(record)}",
        f"samples/s: median error {median(far):.1%}, at most {max(far):.1%}; speed-up over {first.row}: median error "
        f"{median(apart):.1%}, {_within(apart)} rows within 10%"
        if same
        else f"speed-up over {first.row}; published on other hardware, so the two are not to be compared",
        *(f"{result.row}: {result.reason}" for result in record.results if result.reason),
        None if run else NOT_MEASURED,
        *(
            f"measured: samples/s of a median step, on {machine}: {names}"
            for machine, names in machines.items()
        ),
        "measured is of a full mini-batch; published and predicted are of an epoch, which ends in a smaller one"
        if run and epochs
        else None,
    ]
    return table(record.title, columns, record.results, notes)


def _memory(record: Record, measured: Measured) -> Table:
    publication = _published(record)
    readings = {
        paper.row: read(Entry(publication, paper), "reserved") for paper in publication.results
    }
    reserved = {row: reading.middle for row, reading in readings.items() if reading is not None}
    peaks = {
        result.row: result.values["allocated"]
        for result in record.results
        if "allocated" in result.values
    }
    models = {
        result.row: result.values["model"] for result in record.results if result.row in peaks
    }
    both = {row: (sum(peaks[row]), reserved[row], models[row]) for row in peaks if row in reserved}

    def allocated(result: Result) -> object:
        return (
            sum(peaks[result.row])
            if result.row in peaks
            else result.status
            if result.reason
            else "left out"
        )

    columns = [
        ROW,
        by_row("published\nreserved", reserved, _gib, "out of memory"),
        Column("predicted\nallocated", allocated, _gib),
        by_row("share", {row: ours / theirs for row, (ours, theirs, _) in both.items()}, "{:.0%}"),
        by_row("of it\nmodel", models, _gib),
        by_row(
            "of the\nrest",
            {row: (x - model) / (y - model) for row, (x, y, model) in both.items()},
            "{:.0%}",
        ),
        by_row(
            "each device", peaks, lambda each: in_lines([peak / GiB for peak in each], "{:.1f}")
        ),
    ]
    left_out = ", ".join(result.row for result in record.results if allocated(result) == "left out")
    run = [
        f"measured, allocated: {name} {_gib(row.allocated)} on {row.machine}"
        for name, row in measured.items()
        if row.allocated is not None
    ]
    notes = [
        f"GiB, all devices; predicted, not measured, from the hardware description {_hardware(record)}",
        "published: what the caching allocator reserved, which is more than what is allocated to tensors, and has "
        "libraries' workspaces in it; the two kinds are not to be compared, the share only says how far apart they are",
        "model: parameters, buffers, gradients and optimizer state",
        "of the rest: the share without the model, on both sides",
        *(f"{result.row}: {result.reason}" for result in record.results if result.reason),
        f"{left_out}: without portals a skip is copied through every partition on its way, where each holds it for a "
        "while; the replay over bytes knows no such copies"
        if left_out
        else None,
        *(run or [NOT_MEASURED]),
    ]
    return table(f"{record.title}: memory", columns, record.results, notes)


def _throughputs(results: Sequence[Result]) -> dict[str, float]:
    return {
        result.row: speed.middle for result in results if (speed := throughput(result)) is not None
    }


def _gib(size: float) -> str:
    return f"{size / GiB:.1f}"


def _within(errors: Sequence[float]) -> str:
    return f"{sum(error <= 0.1 for error in errors)} of {len(errors)}"


def _published_speed_ups(record: Record, first: str) -> dict[str, float]:
    papers = _published(record).results
    return speed_ups(papers, next(paper for paper in papers if paper.row == first))


def _predicted(record: Record) -> list[Result]:
    return [result for result in record.results if result.status == "predicted"]


def _same_hardware(record: Record) -> bool:
    """Return whether the predictions are for the GPU of the published table."""
    gpu = (_published(record).hardware or {}).get("gpu")
    return gpu is not None and str(gpu) in str((record.hardware or {}).get("title"))


def _published(record: Record) -> Record:
    return published((record.results[0].published or "").partition("/")[0])


def _hardware(record: Record) -> str:
    return str((record.hardware or {}).get("name"))
