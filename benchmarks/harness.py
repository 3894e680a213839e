"""Give benchmarks common options, and a record of results that is saved after each case.

A benchmark has cases. In each case, several *ways* to do the same work take turns: different
engines, different versions, or a loop without a pipeline. The record has one result for each way in
each case. The result's field `experiment` names the case, and its field `row` names the way. The
record keeps only a summary of the measured samples.
"""

import argparse
import signal
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from msgspec.structs import replace

from reproduce.error import Error, Interrupted, fail, interruptible, raise_signalled
from reproduce.machine.allocator import freed_memory_is_kept
from reproduce.machine.devices import Devices
from reproduce.numbers.sources import Entry
from reproduce.records.record import FREED_MEMORY, Record, Result
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder, new_run, prepare_folder
from reproduce.tables.output import FORMATS, Number, of_entry, written

OPTIONS = {
    "rounds": "turns of each way",
    "steps": "steps of a turn",
    "seed": "seed of all that is drawn",
}

WIDTH = 100
"""The longest line of a list in a page."""
Found = Generator[Sequence[Result], None, None]
"""A generator of the results. It yields a result again when the result has more samples."""


def command(
    name: str,
    doc: str,
    *,
    record: bool = True,
    formats: bool = True,
    package: str = "benchmarks",
    **defaults: int,
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line.

    Args:
        name: The name of the benchmark's module, such as `gates.machinery`.
        doc: The docstring of the module. Its first line is the description.
        record: Whether the benchmark makes a record, and so has the option `--out`.
        formats: Whether the results can be printed in several formats, by the option `--format`.
        package: The package that has the module.
        defaults: The default values of the options `rounds`, `steps` and `seed`. If one of them
            has no default here, the benchmark does not have this option.
    """
    sys.excepthook = fail
    signal.signal(signal.SIGTERM, raise_signalled)  # it ends a benchmark as Ctrl-C does
    description = doc.splitlines()[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}.{name}", description=description, allow_abbrev=False
    )
    for option, default in defaults.items():
        text = f"{OPTIONS[option]} (default {default})"
        kind = not_negative if option == "seed" else positive
        parser.add_argument(f"--{option}", type=kind, default=default, metavar="N", help=text)
    if record:
        text = "write a record to FILE, as results come"
        parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    if formats:
        text = "how the results are printed (default text)"
        parser.add_argument("--format", choices=FORMATS, default="text", help=text)
    return parser


def positive(text: str) -> int:
    """Parse a command line argument as a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def not_negative(text: str) -> int:
    """Parse a command line argument as a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def start(
    options: argparse.Namespace,
    name: str,
    title: str,
    unit: dict[str, str],
    devices: int,
) -> Record:
    """Return a record that has no results yet, and describes this machine and the options.

    The record's kind of device is the value of the option `--on`, or `cpu` if the benchmark does
    not have this option. This function also sets the number of PyTorch's CPU threads to one.
    """
    if options.out is not None:
        folder = options.out.absolute().parent
        prepare_folder(folder, "--out")
    given = vars(options)
    settings: dict[str, Any] = {
        key: x for key, x in given.items() if x is not None and not isinstance(x, Path)
    }
    for elsewhere in ("format", "seed"):  # the run has the seed, and the format says nothing of it
        settings.pop(elsewhere, None)
    settings[FREED_MEMORY] = "kept" if freed_memory_is_kept() else "as the C library does"
    device = given.get("on", "cpu")
    threads = 1 if device == "cpu" else None
    used = Devices(device, devices, threads)
    command = ["python", "-m", f"benchmarks.{name}"]  # the settings contain the options
    run = new_run(used, seed=given.get("seed", 0), command=command, settings=settings)
    torch.set_num_threads(1)
    short_name = name.rpartition(".")[2]
    return Record(short_name, title, "measured", unit, [], run=run)


KEPT = "is of revision"
"""The part of a record's note that says that some of its results are of an earlier revision."""


def continued(record: Record, before: Record) -> Record:
    """Return a copy of `record` that has the results of the earlier record `before`.

    Further results can be added to the copy. If the earlier results are of another git revision, a
    note in the copy names this revision.
    """
    assert record.run is not None
    assert before.run is not None
    notes = list(before.notes)
    git = before.run.git
    if git is not None and git != record.run.git:
        notes.append(f"what was found before {record.run.started} {KEPT} {git.revision}")
    software = {**(before.software or {}), **(record.software or {})}
    return replace(record, results=before.results, notes=notes, software=software)


def by_case(record: Record) -> dict[str, dict[str, Result]]:
    """Return the results of a record: a dictionary of dictionaries.

    The keys of the outer dictionary are the names of cases. The keys of an inner dictionary are the
    ways to run the case, such as the name of an engine.
    """
    found: dict[str, dict[str, Result]] = {}
    for result in record.results:
        found.setdefault(result.experiment, {})[result.row] = result
    return found


def cell(reason: str | None) -> str:
    """Turn the reason of a failure into the text of a table cell, with at most 100 characters."""
    words = (reason or "").split()
    text = " ".join(words)
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 100 else f"{text[:99]}…"


def section(title: str, table: str, notes: Sequence[str], style: str) -> str:
    """Join a heading, a table and a list of notes into one text.

    With the style "pipe", the text is Markdown. With any other style, it is for a terminal.
    """
    title = title[0].upper() + title[1:]
    heading = f"## {title}" if style == "pipe" else title
    lines = []
    for note in notes:
        line = fill(
            note,
            WIDTH,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(line)
    return "\n\n".join(filter(None, [heading, table, "\n".join(lines)]))


def summarized(result: Result) -> Result:
    """Return a result whose samples are replaced by their median, quartiles and number.

    For each metric, `values` gets the median, and `values["spread"]` gets the quartiles and the
    number of samples.
    """
    if not result.samples:
        return result
    medians, spread = {}, {}
    for name, series in result.samples.items():
        quartiles = list(series) * 3
        if len(series) > 1:
            quartiles = statistics.quantiles(series, n=4, method="inclusive")
        low, median, high = [float(f"{quartile:.6g}") for quartile in quartiles]
        medians[name] = median
        spread[name] = [low, high, len(series)]
    values = {**result.values, **medians, "spread": spread}
    return replace(result, samples={}, values=values)


def in_format(style: str, table: Callable[[Record, str], str]) -> Callable[[Record], str]:
    """Return a function that turns a record into text in a format of the option `--format`.

    Args:
        style: The format, such as "csv".
        table: A function that renders the record's tables. Its arguments are the record, and
            "simple" for plain text or "pipe" for Markdown.
    """

    def rendered(record: Record) -> str:
        numbers: list[Number] = []
        for result in record.results:
            numbers += of_entry(Entry(record, result))
        return written(style, numbers, table(record, "simple"), table(record, "pipe")).rstrip()

    return rendered


def collect(
    record: Record, path: Path | None, found: Found, total: int, table: Callable[[Record], str]
) -> Record:
    """Run a benchmark, save the record after each case, and print the table at the end.

    Ctrl-C or an error in a process that measures ends the program. Even then, the results so far
    are printed and saved.

    Args:
        record: The record to which results are added.
        path: The record's file. If it is `None`, no file is written.
        found: A generator that runs one case at a time, and yields the results of each case.
        total: The number of cases.
        table: A function that renders the record for the terminal.
    """
    recorder = Recorder(path or Path(), record)
    for result in record.results:
        recorder.put(result)
    progress = Progress()
    failure: tuple[int, str] | None = None  # exit code and reason
    try:
        with interruptible() as check, closing(found):
            progress.show(f"0 of {total}")
            for number, part in enumerate(found, 1):
                for result in part:
                    recorder.put(summarized(result))
                if path is not None:
                    recorder.save()
                progress.show(f"{number} of {total}")
                check()
    except KeyboardInterrupt as interrupt:
        ended = Interrupted(interrupt)
        failure = ended.exit_code, str(ended)
    except Error as error:
        failure = error.exit_code, str(error)
    progress.clear()
    recorder.close("finished" if failure is None else "interrupted")
    record = recorder.record
    if record.results:
        print(table(record))
        if path is not None:
            recorder.save()
    if failure is not None:
        exit_code, reason = failure
        print(f"{record.name}: {reason}; {_finished(record, path)}", file=sys.stderr)
        raise SystemExit(exit_code)
    return record


def _finished(record: Record, path: Path | None) -> str:
    """Say where the finished results of an interrupted benchmark can be found, if there are any."""
    if not record.results:
        return "nothing is finished"
    if path is None:
        return "what is finished is shown above"
    return f"what is finished is in {path}"
