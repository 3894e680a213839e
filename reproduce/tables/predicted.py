"""Make tables that show predictions beside published and measured numbers of the same rows.

Predictions are computed from a description of the hardware, without running anything.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from reproduce.numbers.metrics import MARK, errors, read, speed_ups, throughputs
from reproduce.numbers.sources import Entry
from reproduce.predict.rows import SPEED_TABLES
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from reproduce.tables.layout import Column, GiB, Table, by_value, in_lines, table
from reproduce.tables.measured import Measured, MeasuredRow
from reproduce.tables.rows import ROW, by_row

NOT_MEASURED = "No row of this table has been measured at paper scale yet (see results/measured)."
EMULATED = (
    "For the emulated numbers, every task ran by itself on one device. Then the schedule of n "
    "devices was simulated with the times of the tasks."
)
LEFT_OUT = "left out"
Numbers = dict[str, float]  # maps names of rows to numbers


def predicted_tables(record: Record, measured: Measured) -> list[Table]:
    """Return tables of predictions: of speeds, of memory, or of both.

    Args:
        record: The record (file of results) with the predictions.
        measured: What was measured for the same rows. The tables show these numbers and the
            published numbers beside the predictions. If nothing was measured, a note says so.
    """
    names: set[str] = set()
    for result in record.results:
        names.update(result.values)
    tables = []
    if "throughput" in names:
        tables.append(_speed(record, measured))
    if "allocated" in names:
        tables.append(_memory(record, measured))
    return tables


def throughput_errors(record: Record) -> Numbers:
    """Return the relative error of each row's predicted throughput against the published one."""
    publication = _published(record)
    return errors(throughputs(_predicted(record)), throughputs(publication.results))


def speed_up_errors(record: Record) -> Numbers:
    """Return the relative error of each row's predicted speed-up against the published one.

    Speed-ups are relative to the first row of the table. This first row itself is left out.
    """
    first, *others = _predicted(record)
    return errors(speed_ups(others, first), _published_speed_ups(record, first.row))


def errors_table(records: Sequence[Record]) -> Table:
    """Return a table that shows how far predicted speeds are from published speeds.

    A record of predictions is left out if it is not for the hardware of the published table.
    """
    headings = [
        "rows of",
        "number",
        "samples/s:\nmedian error",
        "largest",
        "speed-ups:\nmedian error",
        "within 10%",
    ]
    speeds: list[float] = []
    ratios: list[float] = []
    for record in records:
        if record.results[0].experiment in SPEED_TABLES and _same_hardware(record):
            speeds += _sizes(throughput_errors(record))
            ratios += _sizes(speed_up_errors(record))
    rows = []
    if speeds:
        errors = [f"{median(speeds):.1%}", f"{max(speeds):.1%}", f"{median(ratios):.1%}"]
        rows.append(["the papers' speed tables", str(len(speeds)), *errors, _within(ratios)])
    return Table("How far predictions are from what was published", headings, rows)


def _speed(record: Record, measured: Measured) -> Table:
    predicted = _predicted(record)
    first = predicted[0].row
    published_speeds = {}
    for paper in _published(record).results:
        published_speeds[paper.row] = paper.values["throughput"]
    published_ratios = _published_speed_ups(record, first)
    shown_ratios = {result.row: published_ratios[result.row] for result in predicted}
    off = throughput_errors(record)
    off_speed_up = speed_up_errors(record)
    shown_off = off
    shown_off_speed_up = off_speed_up
    if not _same_hardware(record):  # Then a difference is no error.
        shown_off = {}
        shown_off_speed_up = {}
    run: Measured = {}
    for machine, rows in measured.items():
        timed = {name: row for name, row in rows.items() if row.throughput is not None}
        if timed:
            run[machine] = timed

    def published_speed(result: Result) -> object:
        return published_speeds[result.row]

    def predicted_speed(result: Result) -> object:
        return result.values["throughput"] if result.row in off else result.status

    columns = [
        ROW,
        Column("samples/s\npublished", published_speed, "{:.1f}"),
        Column("predicted", predicted_speed, "{:.1f}"),
        by_row("error", shown_off, "{:+.0%}"),
        by_row("speed-up\npublished", shown_ratios, "{:.2f}"),
        by_row("predicted", speed_ups(predicted, predicted[0]), "{:.2f}"),
        by_row("error", shown_off_speed_up, "{:+.1%}"),
        *_measured_speeds(run),
    ]
    notes = [
        f"The numbers are predicted from the hardware description {_hardware(record)}.",
        _about_errors(record, first, _sizes(off), _sizes(off_speed_up)),
        *_reasons(record),
        *_about_measured_speeds(record, run),
    ]
    return table(record.title, columns, record.results, notes)


def _measured_speeds(run: Measured) -> Iterator[Column[Result]]:
    """Yield a column of measured or emulated samples per second for each machine.

    If there are several machines, the headings name them. If nothing was run on any machine, there
    is a single column that says so.
    """
    if not run:
        yield by_row("measured", {}, "", "not run")
    for machine, rows in run.items():
        speeds = {}
        for name, row in rows.items():
            mark = MARK if row.disturbed else ""
            speeds[name] = f"{row.throughput:.1f}{mark}"
        heading = " or\n".join(_ways_of(rows.values()))
        if len(run) > 1:
            heading += f"\n{machine}"
        yield by_row(heading, speeds, "", "not run")


def _ways_of(rows: Iterable[MeasuredRow]) -> list[str]:
    """Return the list of how the rows ran: "measured", "emulated", or both of these words."""
    return sorted({row.how for row in rows}, reverse=True)


def _about_errors(
    record: Record, first: str, off: Sequence[float], off_speed_up: Sequence[float]
) -> str:
    """Return a note about how large the errors of the predictions are.

    If the predictions are for other hardware than the published numbers, the note says so instead.

    Args:
        record: The predictions.
        first: The name of the row to which all speed-ups are relative.
        off: The absolute relative errors of the predicted throughputs.
        off_speed_up: The absolute relative errors of the predicted speed-ups.
    """
    if not _same_hardware(record):
        return (
            f"Speed-ups are relative to {first}. Do not compare published and predicted numbers, "
            "which are for different hardware."
        )
    return (
        f"The predicted samples/s have a median error of {median(off):.1%} and a largest error of "
        f"{max(off):.1%}. The speed-ups over {first} have a median error of "
        f"{median(off_speed_up):.1%}, and {_within(off_speed_up)} of them are within 10%."
    )


def _about_measured_speeds(record: Record, run: Measured) -> Iterator[str]:
    """Yield notes about measured and emulated speeds: which rows ran on which machine, and how.

    If necessary, a further note warns of a difference: published and predicted speeds are for an
    epoch, whose last mini-batch is smaller. Measured and emulated speeds are for full mini-batches.
    """
    every: list[MeasuredRow] = []
    for rows in run.values():
        every += rows.values()
    hows = _ways_of(every)
    if "measured" not in hows:
        yield NOT_MEASURED
    if not run:
        return
    for machine, rows in run.items():
        places = {}
        for name, row in rows.items():
            places[name] = f"{row.how} on {machine} (samples/s of a median step)"
        for place, names in by_value(places).items():
            yield f"These rows were {place}: {names}"
    if "emulated" in hows:
        yield EMULATED
    if any("last_batch_size" in result.config for result in record.results):
        yield (
            f"The {' and '.join(hows)} numbers are for a full mini-batch. The published and "
            "predicted numbers are for an epoch, whose last mini-batch is smaller."
        )


def _memory(record: Record, measured: Measured) -> Table:
    reserved = _published_memory(record)
    peaks = {}  # of each device, by row
    models = {}
    left_out = []
    for result in record.results:
        row = result.row
        if "allocated" in result.values:
            peaks[row] = result.values["allocated"]
            models[row] = result.values["model"]
        elif not result.reason:
            left_out.append(row)
    shares = {}
    shares_of_rest = {}
    for row, own in peaks.items():
        if row in reserved:
            model = models[row]
            shares[row] = sum(own) / reserved[row]
            shares_of_rest[row] = (sum(own) - model) / (reserved[row] - model)

    def allocated(result: Result) -> object:
        if result.row in peaks:
            return sum(peaks[result.row])
        return result.status if result.reason else LEFT_OUT

    columns = [
        ROW,
        by_row("published\nreserved", reserved, _gib, "out of memory"),
        Column("predicted\nallocated", allocated, _gib),
        by_row("share", shares, "{:.0%}"),
        by_row("of it\nmodel", models, _gib),
        by_row("of the\nrest", shares_of_rest, "{:.0%}"),
        by_row("each device", peaks, _gib_of_each),
    ]
    notes = [
        "The numbers are GiB of all devices together. They are predicted from the hardware "
        f"description {_hardware(record)}.",
        "published: what the caching allocator reserved, which is more than what is allocated to "
        "tensors, and has libraries' workspaces in it; the two kinds are not to be compared, the "
        "share only says how far apart they are",
        "model: parameters, buffers, gradients and optimizer state",
        "of the rest: the share without the model, on both sides",
        *_reasons(record),
    ]
    if left_out:
        notes.append(
            f"{', '.join(left_out)}: without portals a skip is copied through every partition on "
            "its way, where each holds it for a while; the replay over bytes knows no such copies"
        )
    notes += list(_about_measured_memory(measured)) or [NOT_MEASURED]
    return table(f"{record.title}: memory", columns, record.results, notes)


def _about_measured_memory(measured: Measured) -> Iterator[str]:
    for machine, rows in measured.items():
        for name, row in rows.items():
            if row.allocated is not None:
                yield f"measured, allocated: {name} {_gib(row.allocated)} on {machine}"


def _published_memory(record: Record) -> Numbers:
    """Return a dictionary from the names of published rows to the bytes that were reserved.

    PyTorch's caching allocator reserved these bytes.
    """
    publication = _published(record)
    reserved = {}
    for paper in publication.results:
        reading = read(Entry(publication, paper), "reserved")
        if reading is not None:
            reserved[paper.row] = reading.middle
    return reserved


def _reasons(record: Record) -> Iterator[str]:
    """For each row without a prediction, yield a note that says why there is none."""
    for result in record.results:
        if result.reason:
            yield f"{result.row}: {result.reason}"


def _sizes(errors: Numbers) -> list[float]:
    return [abs(error) for error in errors.values()]


def _gib(size: float) -> str:
    return f"{size / GiB:.1f}"


def _gib_of_each(sizes: Sequence[float]) -> str:
    return in_lines([size / GiB for size in sizes], "{:.1f}")


def _within(errors: Sequence[float]) -> str:
    small = sum(error <= 0.1 for error in errors)
    return f"{small} of {len(errors)}"


def _published_speed_ups(record: Record, first: str) -> Numbers:
    papers = _published(record).results
    base = next(paper for paper in papers if paper.row == first)
    return speed_ups(papers, base)


def _predicted(record: Record) -> list[Result]:
    return [result for result in record.results if result.status == "predicted"]


def _same_hardware(record: Record) -> bool:
    """Return whether the predictions are for the same type of GPU as the published numbers."""
    described = record.hardware or {}
    gpu = (_published(record).hardware or {}).get("gpu")
    return gpu is not None and str(gpu) in str(described.get("title"))


def _published(record: Record) -> Record:
    name = record.results[0].published or ""
    return published(name.partition("/")[0])


def _hardware(record: Record) -> str:
    described = record.hardware or {}
    return str(described.get("name"))
