"""What a training step does, counted, and whether it has come to do more than `benchmarks/counts.json` says.

    python -m benchmarks.counts             # exit with 1 where a count differs from the file's
    python -m benchmarks.counts --update    # write the file, where that is meant

A count has no noise. `Counts` says what is counted, `benchmarks.tally` how. A count that fell has to be written down
as well, or it could grow back unseen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.counted_step import CONFIGURATIONS, PER_TASK, Configuration, Counted, count
from benchmarks.harness import command, render
from reproduce.error import Error
from reproduce.records.decode import decode, read_json
from reproduce.records.record import write_atomically

FILE = Path(__file__).with_name("counts.json")

ADVICE = f"If this is meant, run python -m benchmarks.counts --update, and commit benchmarks/{FILE.name}."

File = Mapping[str, Mapping[str, int]]


def differences(file: File, counted: Mapping[Configuration, Counted]) -> list[str]:
    """Compare; return a line for each count that differs, and for each configuration that only one side has."""
    lines = []
    for configuration, (counts, added) in counted.items():
        row = file.get(str(configuration))
        if row is None:
            lines.append(f"{configuration}: counted, but not in {FILE.name}")
            continue
        for name, now in counts._asdict().items():
            before = row.get(name)
            if before != now:
                lines.append(f"{configuration}: {_difference(name, before, now, configuration, added)}")
    names = {str(configuration) for configuration in counted}
    return lines + [f"{name}: in {FILE.name}, but no longer counted" for name in file if name not in names]


def _difference(
    name: str, before: int | None, now: int | None, configuration: Configuration, added: Counter[str]
) -> str:
    what = name.replace("_", " ")
    if before is None or now is None:
        return f"{what} changed from {_told(before)} to {_told(now)}"
    line = f"{what} {'grew' if now > before else 'fell'} from {before} to {now}"
    if name in PER_TASK:
        line += f", {now / (configuration.n * configuration.m):.2f} per task"
    if name == "operators":
        each = [f"{number:+} {operator}" for operator, number in sorted(added.items()) if number]
        line += f"; in all {', '.join(each)}"
    return line


def _told(number: int | None) -> str:
    return "not counted" if number is None else str(number)


def read(path: Path) -> File:
    """Read committed counts; raise `Error` where the file is none."""
    return decode(dict[str, dict[str, int]], read_json(path), str(path))


def write(path: Path, counted: Mapping[Configuration, Counted]) -> None:
    """Write counts, a line for each configuration; whatever happens, the old file or the new one is there."""
    rows = [
        f"{json.dumps(str(configuration))}: "
        + json.dumps({name: number for name, number in counts._asdict().items() if number is not None})
        for configuration, (counts, _) in counted.items()
    ]
    write_atomically(path, "{\n" + ",\n".join(rows) + "\n}\n")


def tables(counted: Mapping[Configuration, Counted]) -> str:
    """Render a table for each model."""
    shown = ("operators", "nodes", "waits", "reads", "kept", "alive", "threads")
    headers = ["", *(f"{name}\n/task" if name in PER_TASK else name for name in shown)]
    blocks = []
    for model, group in groupby(counted.items(), key=lambda item: item[0].model):
        rows = [[str(c).removeprefix(f"{model} "), *_cells(c, counts._asdict(), shown)] for c, (counts, _) in group]
        body = render(headers, rows, "simple", left=1)
        blocks.append(f"{model}\n\n{body}")
    return "\n\n".join(blocks)


def _cells(c: Configuration, counts: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        number = counts[name]
        yield "" if number is None else f"{number / (c.n * c.m):.2f}" if name in PER_TASK else str(number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every configuration and print a table; compare with the file, or write it."""
    parser = command("counts", __doc__, json=False)
    parser.add_argument("--update", action="store_true", help="write what is counted now")
    options = parser.parse_args(arguments)
    try:
        file = {} if options.update else read(FILE)
    except Error as error:
        raise SystemExit(f"counts: {error}; write it by python -m benchmarks.counts --update") from None
    try:
        counted = {configuration: count(configuration) for configuration in CONFIGURATIONS}
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(tables(counted))
    if options.update:
        write(FILE, counted)
    elif lines := differences(file, counted):
        raise SystemExit("\n".join(["", *lines, ADVICE]))


if __name__ == "__main__":
    main()
