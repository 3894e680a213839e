"""Make the tables of predictions: beside what was published, how far apart, and what was measured where it could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from reproduce.numbers.measured_rows import MeasuredRow
from reproduce.predict.older import OLDER
from reproduce.predict.rows import SPEED_TABLES
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from reproduce.tables.layout import Table, in_lines

__all__ = ["errors_table", "predicted_tables", "speed_up_errors", "throughput_errors"]

GiB = 2**30
NOT_MEASURED = "not measured: no row of it was run at paper scale yet (results/measured)"
Measured = Mapping[str, MeasuredRow]  # by the published row


def predicted_tables(record: Record, measured: Measured | None = None) -> list[Table]:
    """Return the tables of a record of predictions: of speed or of memory, or both, as the published table has them.

    What was `measured` of its rows stands beside, also that nothing was; without it, tables leave that out.
    """
    papers = _papers(record)
    made = []
    if any("throughput" in result.values for result in record.results):
        made.append(_speed(record, papers, measured))
    if any("allocated" in result.values for result in record.results):
        made.append(_memory(record, papers, measured))
    return made


def _memory(record: Record, papers: Mapping[str, Result], measured: Measured | None) -> Table:
    rows, left_out = [], []
    for result in record.results:
        paper = papers[result.row].values
        total = paper.get("memory")
        if total is None and paper.get("peak_activation_memory") is not None:
            total = paper["model_memory"] + paper["peak_activation_memory"]
        reserved = "out of memory" if total is None else f"{total:.1f}"
        if "allocated" not in result.values:
            rows.append([result.row, reserved, result.status if result.reason else "left out", "", "", "", ""])
            if not result.reason:
                left_out.append(result.row)
            continue
        peaks, model = [peak / GiB for peak in result.values["allocated"]], result.values["model"] / GiB
        rows.append(
            [
                result.row,
                reserved,
                f"{sum(peaks):.1f}",
                "" if total is None else f"{sum(peaks) / total:.0%}",
                f"{model:.1f}",
                "" if total is None else f"{(sum(peaks) - model) / (total - model):.0%}",
                in_lines([f"{peak:.1f}" for peak in peaks]),
            ]
        )
    headings = ["row", "published\nreserved", "predicted\nallocated", "share", "of it\nmodel", "of the\nrest",
                "each device"]  # fmt: skip
    notes = [
        f"GiB, all devices; predicted, not measured, from the hardware description {_hardware(record)}",
        "published: what the caching allocator reserved, which is more than what is allocated to tensors, and has "
        "libraries' workspaces in it; the two kinds are not to be compared, the share only says how far apart they are",
        "model: parameters, buffers, gradients and optimizer state",
        "of the rest: the share without the model, on both sides",
        *(f"{result.row}: {result.reason}" for result in record.results if result.reason),
    ]
    if left_out:
        notes.append(
            f"{', '.join(left_out)}: without portals a skip is copied through every partition on its way, where each "
            "holds it for a while; the replay over bytes knows no such copies"
        )
    if measured is not None:
        found = {name: row for name, row in measured.items() if row.allocated is not None}
        notes += [
            f"measured, allocated: {name} {row.allocated / GiB:.1f} on {row.machine}"
            for name, row in found.items()
            if row.allocated is not None
        ] or [NOT_MEASURED]
    return Table(f"{record.title}: memory", headings, rows, notes)


def throughput_errors(record: Record) -> dict[str, float]:
    """Return by how much each predicted throughput differs from the published one, as a share of that."""
    papers, found = _papers(record), [result for result in record.results if result.status == "predicted"]
    return {r.row: float(r.values["throughput"] / papers[r.row].values["throughput"] - 1) for r in found}


def speed_up_errors(record: Record) -> dict[str, float]:
    """Return by how much each predicted speed-up over the table's first row differs from the published one.

    As a share of the published one; the row that they are over is left out.
    """
    papers = _papers(record)
    first, *others = [result for result in record.results if result.status == "predicted"]
    return {r.row: _speed_up(r, first) / _speed_up(papers[r.row], papers[first.row]) - 1 for r in others}


def errors_table(records: Sequence[Record]) -> Table:
    """Return how far predictions of speed are from what was published of the same hardware, older versions first."""
    rows = []
    for name, experiments in (
        ("older versions of torchgpipe", tuple(OLDER)),
        ("the papers' speed tables", SPEED_TABLES),
    ):
        chosen = [r for r in records if r.results[0].experiment in experiments and same_hardware(r)]
        throughput, speed_ups = (
            [abs(error) for record in chosen for error in errors(record).values()]
            for errors in (throughput_errors, speed_up_errors)
        )
        if throughput:
            within = sum(error <= 0.1 for error in speed_ups)
            sizes = (f"{x:.1%}" for x in (median(throughput), max(throughput), median(speed_ups)))
            rows.append([name, str(len(throughput)), *sizes, f"{within} of {len(speed_ups)}"])
    headings = ["rows of", "number", "samples/s:\nmedian error", "largest", "speed-ups:\nmedian error", "within 10%"]
    notes = ["nothing in the prediction was chosen by the older rows before it was first held against them"]
    return Table("How far predictions are from what was published", headings, rows, notes)


def _speed(record: Record, papers: Mapping[str, Result], measured: Measured | None) -> Table:
    errors, off = speed_up_errors(record), throughput_errors(record)
    first = next(result for result in record.results if result.status == "predicted")
    rows = []
    found = {name: row for name, row in (measured or {}).items() if row.throughput is not None}
    for result in record.results:
        paper = papers[result.row]
        here = f"{found[result.row].throughput:.1f}" if result.row in found else "not run"
        if result.status != "predicted":
            rows.append([result.row, f"{paper.values['throughput']:.1f}", result.status, "", "", "", "", here])
            continue
        rows.append(
            [
                result.row,
                f"{paper.values['throughput']:.1f}",
                f"{result.values['throughput']:.1f}",
                f"{off[result.row]:+.0%}",
                f"{_speed_up(paper, papers[first.row]):.2f}",
                f"{_speed_up(result, first):.2f}",
                f"{errors[result.row]:+.1%}" if result.row in errors else "",
                here,
            ]
        )
    headings = ["row", "samples/s\npublished", "predicted", "error", "speed-up\npublished", "predicted", "error",
                "measured"]  # fmt: skip
    if measured is None:
        headings.pop()
        rows = [row[:-1] for row in rows]
    sizes, far = list(map(abs, errors.values())), list(map(abs, off.values()))
    same = same_hardware(record)
    if not same:  # what differs between two kinds of hardware is no error
        headings = [heading for heading in headings if heading != "error"]
        rows = [[*row[:3], *row[4:6], *row[7:]] for row in rows]
    notes = [
        f"predicted, not measured, from the hardware description {_hardware(record)}",
        f"samples/s: median error {median(far):.1%}, at most {max(far):.1%}; speed-up over {first.row}: median error "
        f"{median(sizes):.1%}, {sum(x <= 0.1 for x in sizes)} of {len(sizes)} rows within 10%"
        if same
        else f"speed-up over {first.row}; published on other hardware, so the two are not to be compared",
        *(f"{result.row}: {result.reason}" for result in record.results if result.reason),
    ]
    if measured is not None:
        notes += _measured_notes(record, found)
    return Table(record.title, headings, rows, notes)


def _measured_notes(record: Record, found: Measured) -> list[str]:
    """Say on which machine what was measured, and how it differs from the columns beside it."""
    if not found:
        return [NOT_MEASURED]
    machines = dict.fromkeys(row.machine for row in found.values())
    notes = [
        f"measured: samples/s of a median step, on {machine}: "
        f"{', '.join(name for name, row in found.items() if row.machine == machine)}"
        for machine in machines
    ]
    if any("last_batch_size" in result.config for result in record.results):
        notes.append(
            "measured is of a full mini-batch; published and predicted are of an epoch, which ends in a smaller one"
        )
    return notes


def _speed_up(result: Result, over: Result) -> float:
    return float(result.values["throughput"] / over.values["throughput"])


def same_hardware(record: Record) -> bool:
    """Return whether the predictions are for the GPU that the published table was taken on."""
    gpu = (_published(record).hardware or {}).get("gpu")
    return gpu is not None and str(gpu) in str((record.hardware or {}).get("title"))


def _published(record: Record) -> Record:
    return published((record.results[0].published or "").partition("/")[0])


def _papers(record: Record) -> dict[str, Result]:
    return {result.row: result for result in _published(record).results}


def _hardware(record: Record) -> str:
    return str((record.hardware or {}).get("name"))
