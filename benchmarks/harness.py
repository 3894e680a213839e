"""What all benchmarks share: options, and a record that is rewritten after each result.

A benchmark has cases. In each case, several *ways* to do the same work run in turn: engines, versions, a plain loop.
The record has a result for each case and way: the case is its `experiment`, the way its `row`. Samples are kept as a
summary.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from msgspec.structs import replace

from reproduce.error import INTERRUPTED, Error, fail, interruptible
from reproduce.machine.allocator import freed_memory_is_kept
from reproduce.machine.devices import Devices
from reproduce.records.record import FREED_MEMORY, Record, Result
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder, new_run, prepare_folder

Found = Generator[Sequence[Result], None, None]
"""Yields results during the benchmark. A result is yielded again when it has more samples."""


def command(name: str, doc: str, *, json: bool = True, **defaults: int) -> argparse.ArgumentParser:
    """Return the parser of the benchmark of that name, such as `gates.machinery`.

    It has the option `--json`, and `--rounds` and `--steps` if `defaults` has them.
    """
    sys.excepthook = fail
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0]
    )
    for option, default in defaults.items():
        what = {"rounds": "turns of each way", "steps": "steps of a turn"}[option]
        parser.add_argument(
            f"--{option}", type=positive, default=default, help=f"{what} (default {default})"
        )
    if json:
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write a record to FILE, as results come"
        )
    return parser


def positive(text: str) -> int:
    """Parse a positive integer of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def start(
    options: argparse.Namespace,
    name: str,
    title: str,
    unit: dict[str, str],
    *,
    devices: int,
    device: str = "cpu",
) -> Record:
    """Return an empty record with machine and options. From now on each CPU device has one thread."""
    if options.json is not None:
        prepare_folder(options.json.absolute().parent, "--json")
    given = {
        key: value
        for key, value in vars(options).items()
        if not isinstance(value, Path) and value is not None
    }
    run = new_run(
        Devices(device, devices, 1 if device == "cpu" else None),
        seed=0,
        command=["python", "-m", f"benchmarks.{name}"],  # settings have its options
        settings={
            **given,
            FREED_MEMORY: "kept" if freed_memory_is_kept() else "as the C library does",
        },
    )
    torch.set_num_threads(1)
    return Record(name.rpartition(".")[2], title, "measured", unit, [], run=run)


def continued(record: Record, before: Record) -> Record:
    """Return a record with the results of an earlier one. A note gives their git revision."""
    assert record.run is not None and before.run is not None
    notes, git = list(before.notes), before.run.git
    if git is not None and git != record.run.git:
        notes.append(f"what was found before {record.run.started} is of revision {git.revision}")
    software = {**(before.software or {}), **(record.software or {})}
    return replace(record, results=before.results, notes=notes, software=software)


def by_case(record: Record) -> dict[str, dict[str, Result]]:
    """Return a record's results by case and way."""
    found: dict[str, dict[str, Result]] = {}
    for result in record.results:
        found.setdefault(result.experiment, {})[result.row] = result
    return found


def cell(reason: str | None) -> str:
    """Return a reason as a cell of a table, of at most 100 characters."""
    text = " ".join((reason or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 100 else f"{text[:99]}…"


def summarized(result: Result) -> Result:
    """Replace a result's samples by their medians; `spread` has their quartiles and count."""
    if not result.samples:
        return result
    medians, spread = {}, {}
    for name, series in result.samples.items():
        parts = statistics.quantiles(series, n=4) if len(series) > 1 else [*series] * 3
        low, medians[name], high = (float(f"{part:.6g}") for part in parts)
        spread[name] = [low, high, len(series)]
    return replace(result, samples={}, values={**result.values, **medians, "spread": spread})


def collect(
    record: Record, path: Path | None, found: Found, total: int, table: Callable[[Record], str]
) -> Record:
    """Run the generator `found`, of `total` parts; rewrite the record's file after each; at the end print the table.

    Ctrl-C, or an error of a measuring process, ends the program. Results so far are printed and recorded nevertheless.
    """
    recorder = Recorder(path or Path(), record)
    for result in record.results:
        recorder.put(result)
    save = recorder.save if path is not None else lambda: None
    progress = Progress()
    why: tuple[int, str] | None = None  # exit code and reason, if it does not finish
    try:
        with interruptible() as check, closing(found):
            progress.show(f"0 of {total}")
            for number, part in enumerate(found, 1):
                for result in part:
                    recorder.put(summarized(result))
                save()
                progress.show(f"{number} of {total}")
                check()
    except KeyboardInterrupt:
        why = INTERRUPTED, "interrupted"
    except Error as error:
        why = error.exit_code, str(error)
    progress.clear()
    recorder.close("finished" if why is None else "interrupted")
    record = recorder.record
    if record.results:
        print(table(record))
        save()
    if why is not None:
        where = "shown above" if path is None else f"in {path}"
        left = f"what is finished is {where}" if record.results else "nothing is finished"
        print(f"{record.name}: {why[1]}; {left}", file=sys.stderr)
        raise SystemExit(why[0])
    return record
