"""Make the report page: one HTML file with tables and figures, which loads no other files.

`page.html` is the template of the page.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import Gpu
from reproduce.numbers.match import grouped
from reproduce.records.record import Record, Run
from reproduce.report.bars import ablation_figures, memory_figures
from reproduce.report.figures import history_figures, speed_up_figures
from reproduce.report.gantt import schedule_figures, trace_figures
from reproduce.report.side_by_side import side_by_side
from reproduce.report.subjects import KINDS, RUN, Kind, Subject, find_subjects, unpublished
from reproduce.tables.all import about_run, tables
from reproduce.tables.history import Line
from reproduce.tables.layout import GiB, Table, in_full, many
from reproduce.tables.predicted import errors_table
from torchgpipe.plan.predict.replay import Timeline

FOLDER = Path(__file__).parent
TITLE = "GPipe: published, predicted, measured, emulated"
MEANINGS: dict[Kind, str] = {
    "published": "by the papers",
    "predicted": "for a described machine, nothing run",
    "measured": "on a real machine",
    "emulated": "every task run on one device, the overlap of n worked out",
}
ORDER = ("measured", "predicted", "published")
"""The kinds of record, in the order in which the page says where records come from."""
PROSE = 40  # characters; a cell with more of them is a sentence, and has lines
WORD = 24
"""The characters of a word that stays in one line. A longer one, as of a path, may not fit."""


def page(
    records: Sequence[Record],
    traces: Sequence[tuple[str, Timeline]] = (),
    history: Sequence[Line] = (),
    own: Sequence[Record] = (),
    skipped: Sequence[str] = (),
) -> str:
    """Return the report page as HTML.

    Args:
        records: The records (files of results) that the page shows: published, predicted, measured
            or emulated results.
        traces: The title and the timeline of each recorded training step.
        history: The numbers of each git revision, for figures that show how they changed.
        own: The records of the user's own runs, which are shown beside the results in `records`.
        skipped: A line of text for each file that could not be read.
    """
    own = unpublished(own, records)
    sections = []
    others = []
    shown = {}
    kinds: dict[str, list[Kind]] = {}  # for each record's name, the kinds of its numbers
    for subject in find_subjects(records, own):
        # A subject is an experiment or a published table. Published tables that no experiment
        # reproduces come last on the page, and are collapsed, because there is nothing to compare.
        if subject.name in EXPERIMENTS or _has_other_numbers(subject):
            sections.append(_section(subject))
        else:
            others.append(_other(subject))
        for source in subject.sources:
            shown[source.record.name] = source.record
            kinds.setdefault(source.record.name, []).append(source.kind)
    counts: Counter[str] = Counter()
    predicted = []
    for record in [*records, *own]:
        counts.update(result.status for result in record.results)
        if record.kind == "predicted":
            predicted.append(record)
    # Records with the same machine, software and run are listed together, under one description.
    made = sorted(shown.values(), key=lambda record: ORDER.index(record.kind))
    text = _template().render(
        title=TITLE,
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        meanings=MEANINGS,
        records=len(records) + len(own),
        skipped=skipped,
        counts=counts,
        errors=errors_table(predicted),
        sections=sections,
        traces=list(trace_figures(traces)),
        history=history_figures(history),
        schedules=list(schedule_figures()),
        machines=_machines(made, kinds, own),
        others=others,
    )
    return text.lstrip()


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"many": many, "zip": zip, "whole": whole, "heading": in_full}
    environment.globals["prose"] = PROSE
    return environment.get_template("page.html")


def whole(text: str) -> Markup:
    """Convert a text to HTML in which numbers, and words with a hyphen or slash, stay on one line.

    A mean and its deviation, such as `22.0 ± 0.1`, count as one number. A browser may still break a
    word of more than `WORD` characters, which may be wider than its cell.
    """
    text = text.replace(" +- ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    parts = []
    for part in re.split("([ \n]+)", text):
        escaped = escape(part)
        if re.search("[0-9/-]", part) and len(part) <= WORD:
            parts.append(Markup('<span class="whole">{}</span>').format(escaped))
        else:
            parts.append(escaped)
    return Markup("").join(parts)


def _has_other_numbers(subject: Subject) -> bool:
    """Return whether an experiment or table has any numbers besides the published ones."""
    return any(source.kind != "published" for source in subject.sources)


def _section(subject: Subject) -> dict[str, Any]:
    """Return the variables with which the page's template writes the section about a subject.

    A subject is an experiment or a published table, with its numbers.
    """
    runs = {}
    for source in subject.sources:
        if source.kind in RUN and subject.name in EXPERIMENTS:
            runs[source.record.name] = source.record
    of_runs = {}
    for name, run in runs.items():
        made = tables(run, subject.name)
        if made:
            of_runs[name] = made
    figures = list(speed_up_figures(subject))
    figures += memory_figures(subject)
    figures += ablation_figures(subject)
    return {
        "subject": subject,
        "side_by_side": side_by_side(subject),
        "figures": figures,
        "runs": of_runs,
    }


def _other(subject: Subject) -> Table:
    """Return a table with all values of a published table, as they were published.

    This function is for published tables that no experiment of this program reproduces.
    """
    record = subject.sources[0].record
    names: dict[str, None] = {}
    for result in record.results:
        names.update(dict.fromkeys(result.values))
    headings = ["row"]
    for name in names:
        heading = name.replace("_", " ")
        if name in record.unit:
            heading += f", {record.unit[name]}"
        headings.append(heading)
    rows = []
    for result in record.results:
        cells = [_value(result.values.get(name)) for name in names]
        rows.append([result.row, *cells])
    return Table(f"{subject.name}: {subject.title}", headings, rows)


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
    return str(value)


def _machines(
    records: Sequence[Record], kinds: Mapping[str, Sequence[Kind]], own: Sequence[Record]
) -> list[dict[str, Any]]:
    """Describe where records (files of results) come from: the machine, the software and so on.

    Records from the same machine and software share one description. A description is a dictionary
    with a title, the names of the records, and lines of text.

    Args:
        records: The records.
        kinds: Maps the name of each record to the kinds of its numbers, such as "measured".
        own: The records of the user's own runs.
    """
    owned = {record.name for record in own}
    entries = []
    for lines, group in grouped(records, _origin).items():
        names = [record.name for record in group]
        found: set[Kind] = set()
        for name in names:
            found.update(kinds[name])
        words = [kind for kind in KINDS if kind in found]
        heading = ", ".join(words)
        if owned.intersection(names):
            heading = f"own run, {heading}"
        titles = names if len(names) > 1 else [group[0].title]
        title = f"{heading}: {', '.join(titles)}"
        entries.append({"title": title, "names": names, "lines": lines})
    return entries


def _origin(record: Record) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for files of results from the same machine, software and so on."""
    return tuple(provenance(record).items())


def provenance(record: Record) -> dict[str, str]:
    """Return a dictionary from titles to texts that say where a record's numbers come from.

    For the record of a run, the texts describe the machine, the software and more. For the record
    of a published table, they describe the publication, and the hardware and software in it.
    """
    run = record.run
    about = _publication(record) if run is None else _machine(record, run)
    return {name: text for name, text in about.items() if text}


def _machine(record: Record, run: Run) -> dict[str, str]:
    about = {}
    for name, line in about_run(record, run).items():
        about[name] = line.removeprefix(f"{name}: ").replace("`", "")
    gpus = []
    for gpu, count in Counter(map(_gpu, run.machine.gpus)).items():
        gpus.append(f"{count} x {gpu}")
    about["cores installed"] = str(run.machine.cores_installed)
    about["GPUs"] = "; ".join(gpus)
    return about


def _publication(record: Record) -> dict[str, str]:
    verdicts = []
    for discrepancy in record.discrepancies:
        verdict = discrepancy.values.get("verdict")
        verdicts.append(f"{discrepancy.row}: {verdict}")
    return {
        "source": _listed(record.source),
        "hardware": _listed(record.hardware),
        "software": _listed(record.software),
        "notes": " ".join(record.notes),
        "disagreements": "; ".join(verdicts),
    }


def _gpu(gpu: Gpu) -> str:
    """Describe a GPU in one line: its name, memory, clock rates, power limit and link."""
    parts = [gpu.name, f"{gpu.memory / GiB:.0f} GiB"]
    units = {"MHz": gpu.clock, "MHz memory": gpu.memory_clock, "W": gpu.power_limit}
    for unit, value in units.items():
        if value:
            parts.append(f"{value:.0f} {unit}")
    if gpu.link:
        parts.append(gpu.link)
    return ", ".join(parts)


def _listed(fields: Mapping[str, object] | None) -> str:
    """Return the names and values of fields in one line, without fields whose value is None."""
    parts = []
    for name, value in (fields or {}).items():
        if value is not None:
            heading = name.replace("_", " ")
            parts.append(f"{heading}: {_value(value)}")
    return "; ".join(parts)
