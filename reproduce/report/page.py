"""Write the page: one HTML file with everything in it, that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import Record
from reproduce.report.bars import ablation_figures, memory_figures
from reproduce.report.beside import Beside, lay_beside
from reproduce.report.curves import speed_up_figures
from reproduce.report.gather import Source, Subject, gather
from reproduce.report.machines import facts
from reproduce.report.timelines import timeline_figures, trace_figures
from reproduce.tables.all import tables
from reproduce.tables.layout import Table, many
from torchgpipe.plan.replay import Timeline

__all__ = ["page"]

STYLE = Path(__file__).with_name("style.css")
DENSE = 11  # columns, from which on they are set closer
TITLE = "GPipe: published, predicted, measured"
KINDS = {"published": "by the papers", "predicted": "for a described machine", "measured": "on a real machine"}


def page(records: Sequence[Record], traces: Sequence[tuple[str, Timeline]] = ()) -> str:
    """Return the page of everything that the records hold, and of the timelines of measured steps, with titles."""
    subjects = gather(records)
    # What has neither an experiment nor anything to lay beside it comes last, folded away.
    others = [
        subject
        for subject in subjects
        if subject.name not in EXPERIMENTS and all(source.kind == "published" for source in subject.sources)
    ]
    shown = [subject for subject in subjects if subject not in others]
    used = {source.record.name: source.record for subject in subjects for source in subject.sources}
    parts = [
        f"<h1>{TITLE}</h1>",
        '<p class="lead">The papers&rsquo; experiments on pipeline parallelism, with what was published, what is '
        "predicted and what was measured side by side. Every number is worked out from a record, and none is typed "
        "by hand.</p>",
        _key(records),
        _navigation([*(subject.name for subject in shown), "timelines", "machines"]),
        *(_section(subject) for subject in shown),
        _timelines(traces),
        _machines(used.values()),
        _others(others),
        f"<footer>Made by <code>make report</code> from {many(len(records), 'record')}.</footer>",
    ]
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n<title>{TITLE}</title>\n'
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>"
    )
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _key(records: Sequence[Record]) -> str:
    counts = {kind: sum(record.kind == kind for record in records) for kind in KINDS}
    items = "".join(
        f'<li class="{kind}"><strong>{kind}</strong> {said}: {many(counts[kind], "record")}</li>'
        for kind, said in KINDS.items()
    )
    return f'<ul class="key">{items}</ul>'


def _navigation(names: Iterable[str]) -> str:
    return f"<nav><ul>{''.join(f'<li><a href=#{escape(name)}>{escape(name)}</a></li>' for name in names)}</ul></nav>"


def _section(subject: Subject) -> str:
    figures = [*speed_up_figures(subject), *memory_figures(subject), *ablation_figures(subject)]
    details = []
    for record in {source.record.name: source.record for source in subject.measured}.values():
        for table in tables(record, subject.name) if subject.name in EXPERIMENTS else []:
            details.append(_table(table))
    folded = f"<details><summary>All measured rows</summary>{''.join(details)}</details>" if details else ""
    return (
        f'<section id="{escape(subject.name)}"><h2>{escape(subject.name)}</h2>'
        f'<p class="lead">{escape(subject.title)}</p>'
        f"{_beside(lay_beside(subject))}"
        f"{_figures(figures)}{folded}</section>"
    )


def _beside(table: Beside) -> str:
    groups: list[tuple[str, int]] = []
    for column in table.columns:
        heading = column.heading if column.source else ""
        if groups and groups[-1][0] == heading:
            groups[-1] = heading, groups[-1][1] + 1
        else:
            groups.append((heading, 1))
    over = "".join(
        f'<th colspan="{count}" scope="colgroup">{escape(name)}</th>' if name else f'<td colspan="{count}"></td>'
        for name, count in groups
    )
    under = "".join(
        f'<th scope="col" class="{"left" if i == 0 else ""}{column.source.kind if column.source else ""}">'
        f"{_link(column.source) if column.source else escape(column.heading)}</th>"
        for i, column in enumerate(table.columns)
    )
    body = []
    for row in table.rows:
        cells = []
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            kind = column.source.kind if column.source else "field"
            label = f"{column.heading}, {column.source.label}" if column.source else column.heading
            cells.append(_cell(cell, label, kind))
        body.append(f'<tr><th scope="row" class="left">{escape(row[0])}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="wide"><table class="{"dense" if len(table.columns) > DENSE else ""}">'
        f'<thead><tr class="groups">{over}</tr><tr>{under}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        + _notes(table.notes)
    )


def _link(source: Source) -> str:
    return f'<a href="#{escape(source.anchor)}">{escape(source.label)}</a>'


def _cell(text: str, label: str, kind: str = "") -> str:
    classes = " ".join(filter(None, [kind, "empty" if text in ("", "-") else ""]))
    return f'<td class="{classes}" data-label="{escape(label)}"><span>{escape(text)}</span></td>'


def _table(table: Table) -> str:
    headings = [heading.replace("\n", " ") for heading in table.headings]
    head = "".join(
        f'<th scope="col" class="{"left" if i < table.left else ""}">{escape(name)}</th>'
        for i, name in enumerate(headings)
    )
    body = "".join(
        f'<tr><th scope="row" class="left">{escape(row[0])}</th>'
        + "".join(_cell(cell.replace("\n", " "), name) for name, cell in zip(headings[1:], row[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    made = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h3>{escape(table.title)}</h3><div class="wide">{made}</div>{_notes(table.notes)}'


def _notes(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _timelines(traces: Sequence[tuple[str, Timeline]]) -> str:
    measured = (
        f'<h3>Measured</h3><p class="note">Copies are left out.</p>{_figures(trace_figures(traces))}' if traces else ""
    )
    return (
        '<section id="timelines"><h2>timelines</h2><p class="lead">How schedules fill the devices&rsquo; time. The '
        f"numbers are those of the micro-batches, and each picture is as wide as its step.</p>{measured}"
        '<h3>Predicted: a replay of equal tasks</h3><p class="note">Backward takes twice as long as forward, '
        "recomputation as long as forward, and copies nothing, so that all waiting is the schedule&rsquo;s own.</p>"
        f"{_figures(timeline_figures())}</section>"
    )


def _figures(figures: Sequence[tuple[str, str]]) -> str:
    drawn = "".join(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in figures)
    return f'<div class="figures">{drawn}</div>' if drawn else ""


def _machines(records: Iterable[Record]) -> str:
    """Tell everything once, whichever records it is true of."""
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record in sorted(records, key=lambda record: ["measured", "predicted", "published"].index(record.kind)):
        groups.setdefault(tuple(facts(record).items()), []).append(record)
    parts = []
    for said, group in groups.items():
        anchors = "".join(f'<span id="machine-{escape(record.name)}"></span>' for record in group)
        lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in said)
        title = ", ".join(record.name for record in group) if len(group) > 1 else group[0].title
        parts.append(f"<h3>{anchors}{group[0].kind}: {escape(title)}</h3><dl>{lines}</dl>")
    return (
        '<section id="machines"><h2>machines</h2><p class="lead">What is behind every number: the machine, its '
        f"software and the run; or the publication; or the hardware description.</p>{''.join(parts)}</section>"
    )


def _others(subjects: Sequence[Subject]) -> str:
    if not subjects:
        return ""
    parts = []
    for subject in subjects:
        record = subject.sources[0].record
        names = list(dict.fromkeys(name for result in record.results for name in result.values))
        units = [f"{name.replace('_', ' ')}, {record.unit[name]}" if name in record.unit else name.replace("_", " ")
                 for name in names]  # fmt: skip
        rows = [[result.row, *(_said(result.values.get(name)) for name in names)] for result in record.results]
        parts.append(_table(Table(f"{subject.name}: {subject.title}", ["row", *units], rows)))
    return (
        f'<section id="others"><h2>other published tables</h2><p class="lead">{many(len(subjects), "table")} that no '
        f"experiment here reproduces.</p><details><summary>Show them</summary>{''.join(parts)}</details></section>"
    )


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
    return "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
