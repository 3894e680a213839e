"""Write the page: one self-contained HTML file, which loads nothing from the network. page.html is its template."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import Gpu
from reproduce.numbers.match import grouped
from reproduce.records.record import Record
from reproduce.report.figures import (
    ablation_figures,
    history_figures,
    memory_figures,
    speed_up_figures,
)
from reproduce.report.gantt import schedule_figures, trace_figures
from reproduce.report.subjects import RUN, Subject, find_subjects, side_by_side
from reproduce.tables.all import about_run, tables
from reproduce.tables.history import Line
from reproduce.tables.layout import GiB, Table, many
from reproduce.tables.predicted import errors_table
from torchgpipe.plan.replay import Timeline

FOLDER = Path(__file__).parent
DENSE = 11  # columns; the page sets wider tables more tightly
TITLE = "GPipe: published, predicted, emulated, measured"
KINDS = {
    "published": "by the papers",
    "predicted": "for a described machine, nothing run",
    "emulated": "every task run on one device, the overlap of n worked out",
    "measured": "on a real machine",
}


def page(
    records: Sequence[Record],
    traces: Sequence[tuple[str, Timeline]] = (),
    history: Sequence[Line] = (),
) -> str:
    """Return the page about all records, the timelines (with titles) of recorded steps, and a history."""
    subjects = find_subjects(records)
    # Published tables without an experiment or other numbers come last, collapsed.
    others = [
        x
        for x in subjects
        if x.name not in EXPERIMENTS and all(y.kind == "published" for y in x.sources)
    ]
    # Records with the same machine, software and run are listed together, under one description.
    shown = {source.record.name: source.record for each in subjects for source in each.sources}
    made = sorted(shown.values(), key=lambda record: list(reversed(KINDS)).index(record.kind))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"many": many, "zip": zip}
    text = environment.get_template("page.html").render(
        title=TITLE,
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        kinds=KINDS,
        dense=DENSE,
        records=records,
        counts=Counter(result.status for record in records for result in record.results),
        errors=errors_table([record for record in records if record.kind == "predicted"]),
        sections=[_section(subject) for subject in subjects if subject not in others],
        traces=list(trace_figures(traces)),
        history=history_figures(history),
        schedules=list(schedule_figures()),
        machines=grouped(made, lambda record: tuple(provenance(record).items())),
        others=[_other(subject) for subject in others],
    )
    return text.lstrip()


def _section(subject: Subject) -> dict[str, Any]:
    runs = {
        source.record.name: source.record for source in subject.sources if source.kind in RUN
    }.values()
    return {
        "subject": subject,
        "side_by_side": side_by_side(subject),
        "figures": [
            *speed_up_figures(subject),
            *memory_figures(subject),
            *ablation_figures(subject),
        ],
        "tables": [
            table
            for run in runs
            if subject.name in EXPERIMENTS
            for table in tables(run, subject.name)
        ],
    }


def _other(subject: Subject) -> Table:
    record = subject.sources[0].record
    names = list(dict.fromkeys(name for result in record.results for name in result.values))
    units = [
        f"{name.replace('_', ' ')}, {record.unit[name]}"
        if name in record.unit
        else name.replace("_", " ")
        for name in names
    ]
    rows = [
        [result.row, *(_value(result.values.get(name)) for name in names)]
        for result in record.results
    ]
    return Table(f"{subject.name}: {subject.title}", ["row", *units], rows)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
    return (
        "-"
        if value is None
        else ", ".join(map(_value, value))
        if isinstance(value, list)
        else str(value)
    )


def provenance(record: Record) -> dict[str, str]:
    """Return where a record's numbers come from, by name: machine, software and run; publication; hardware."""
    if (run := record.run) is not None:
        gpus = Counter(map(_gpu, run.machine.gpus))
        about = {
            **{
                name: line.removeprefix(f"{name}: ").replace("`", "")
                for name, line in about_run(record, run).items()
            },
            "cores installed": str(run.machine.cores_installed),
            "GPUs": "; ".join(f"{count} x {gpu}" for gpu, count in gpus.items()),
        }
    else:
        about = {
            "source": _listed(record.source),
            "hardware": _listed(record.hardware),
            "software": _listed(record.software),
            "notes": " ".join(record.notes),
            "disagreements": "; ".join(
                f"{each.row}: {each.values.get('verdict')}" for each in record.discrepancies
            ),
        }
    return {name: text for name, text in about.items() if text}


def _gpu(gpu: Gpu) -> str:
    units = {"MHz": gpu.clock, "MHz memory": gpu.memory_clock, "W": gpu.power_limit}
    known = [f"{value:.0f} {unit}" for unit, value in units.items() if value]
    return ", ".join([gpu.name, f"{gpu.memory / GiB:.0f} GiB", *known, *filter(None, [gpu.link])])


def _listed(fields: Mapping[str, object] | None) -> str:
    known = {
        name.replace("_", " "): _value(x) for name, x in (fields or {}).items() if x is not None
    }
    return "; ".join(f"{name}: {text}" for name, text in known.items())
