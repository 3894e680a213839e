"""Count the operations of a training step, and compare the counts with `counts.json`.

    python -m benchmarks.gates.counts             # exit with 1 if a count differs from the file's
    python -m benchmarks.gates.counts --update    # write the file, if the change is intended

Unlike times, counts are the same in each run. `benchmarks.gates.counted` says what is counted, and
`benchmarks.gates.tally` says how. A count that has become lower also has to be written to the file.
Otherwise, nobody would notice if the count later rose to its old value.

The file `orders.json` has the order in which each device runs its tasks. The program compares this
order, too.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gates.answer import answer, called
from benchmarks.gates.failures import in_one_line
from benchmarks.harness import command
from reproduce.error import Error
from reproduce.records.places import decode, read_json
from reproduce.records.record import write_atomically
from reproduce.tables.output import Number

if TYPE_CHECKING:
    from benchmarks.gates.counted import Counts

FOLDER = Path(__file__).parent
COUNTS = "counts.json"
ORDERS = "orders.json"
ADVICE = (
    "If this is meant, run python -m benchmarks.gates.counts --update, "
    f"and commit benchmarks/gates/{COUNTS} and {ORDERS}."
)

Totals = dict[str, int]
Orders = Mapping[str, list[str]]
"""Maps the name of a configuration to the tasks of each device, in the order in which they run."""


def differences(file: Mapping[str, Totals], counted: Mapping[str, "Counts"]) -> list[str]:
    """Return a line of text for each count that differs from the count in the committed file.

    A configuration that is missing in `file` or in `counted` also gets a line.

    Args:
        file: Maps the name of a configuration to its counts in the file.
        counted: Maps the name of a configuration to what was counted in this run.
    """
    lines = _missing(COUNTS, file, counted)
    for name, counts in counted.items():
        if name not in file:
            continue
        for what, now in counts.totals().items():
            before = file[name].get(what, 0)
            if now != before:
                change = "grew" if now > before else "fell"
                line = f"{name}: {what} {change} from {before} to {now}"
                if what == "operators":
                    line += f"; in all {_listed(counts.operators)}"
                lines.append(line)
    return lines


def other_orders(file: Orders, noted: Orders) -> list[str]:
    """Return a line of text for each device whose order of tasks differs from the committed order.

    The line says from which task on the order differs. A configuration that is missing in `file`
    (the committed orders) or in `noted` (the orders of this run) also gets a line.
    """
    lines = _missing(ORDERS, file, noted)
    for name in noted.keys() & file.keys():
        for device, (before, now) in enumerate(zip(file[name], noted[name], strict=True)):
            old, new = before.split(), now.split()
            if old != new:
                place = 0
                while old[place : place + 1] == new[place : place + 1]:
                    place += 1
                was, comes = " ".join(old[place:]), " ".join(new[place:])
                lines.append(
                    f"{name}: device {device} runs {comes or 'nothing'} after its first {place} "
                    f"tasks, which was {was or 'nothing'}"
                )
    return sorted(lines)


def _missing(file_name: str, file: Iterable[str], now: Iterable[str]) -> list[str]:
    gone = [name for name in file if name not in now]
    new = [name for name in now if name not in file]
    lines = [f"{name}: in {file_name}, but no longer counted" for name in gone]
    return lines + [f"{name}: counted, but not in {file_name}" for name in new]


def _listed(operators: Mapping[str, int]) -> str:
    counts = [f"{n:+} {operator}" for operator, n in sorted(operators.items()) if n]
    return ", ".join(counts)


def main(arguments: list[str] | None = None) -> None:
    """Count the operations of all configurations, note the orders of tasks, compare with the files.

    With the option --update, write the counts and the orders into the files.
    """
    parser = command("gates.counts", __doc__, record=False)
    parser.add_argument("--update", action="store_true", help="write what is counted now")
    options = parser.parse_args(arguments)
    counts: dict[str, Totals] = {}
    orders: dict[str, list[str]] = {}
    try:
        counts = decode(dict[str, Totals], read_json(FOLDER / COUNTS), COUNTS)
        orders = decode(dict[str, list[str]], read_json(FOLDER / ORDERS), ORDERS)
    except Error as error:
        if not options.update:
            update = "write it by python -m benchmarks.gates.counts --update"
            raise Error(f"counts: {error}; {update}") from None
    with in_one_line("counts"):
        counted, noted = count_all()
    changes = differences(counts, counted) + other_orders(orders, noted)
    said = f"{len(counted)} counts and {len(noted)} orders"
    lost: list[str] = []
    if options.update:
        counts = {name: each.totals() for name, each in counted.items()}
        orders = noted
        _write(COUNTS, counts)
        _write(ORDERS, orders)
    elif changes:
        lost = [*changes, ADVICE]
    told = [*changes, f"{said}: {'written' if changes else 'as committed'}"]
    numbers = [*_numbers(counts, counted), *_orders(orders, noted)]
    answer(options.format, numbers, told, lost)


def _numbers(file: Mapping[str, Totals], counted: Mapping[str, "Counts"]) -> Iterator[Number]:
    """Yield an entry for each count in `counted`, for output in CSV and JSON.

    The entry's verdict is "worse" if the count differs from the committed count in `file`, or if
    `file` does not have the configuration.
    """
    for name, counts in counted.items():
        about: Number = {"experiment": "counts", "row": name, "kind": "measured"}
        before = file.get(name, {})
        for what, now in counts.totals().items():
            verdict = called(name not in file or before.get(what, 0) != now)
            yield {**about, "metric": what, "unit": "count", "value": now, "verdict": verdict}


def _orders(file: Orders, noted: Orders) -> Iterator[Number]:
    """Yield an entry for each configuration, with the order of its tasks, for CSV and JSON.

    The order is a list that has, for each device, a text such as "0a 1a B0a B1a". The entry's
    verdict is "worse" if the order differs from the committed order in `file`.
    """
    for name, now in noted.items():
        about: Number = {"experiment": "orders", "row": name, "kind": "measured"}
        yield {**about, "metric": "order", "value": now, "verdict": called(file.get(name) != now)}


def count_all() -> tuple[dict[str, "Counts"], dict[str, list[str]]]:
    """Return two dictionaries, whose keys are the names of configurations.

    The first dictionary has the operations that the configuration's pipeline adds in a training
    step. The second dictionary has a list with a text for each device: the order of its tasks.
    """
    import torch

    from benchmarks.gates import counted, orders

    # With more threads, those that wait for work would take the cores.
    torch.set_num_threads(1)
    return dict(counted.counted()), dict(orders.orders())


def _write(name: str, rows: Mapping[str, object]) -> None:
    """Write a JSON file into the folder `benchmarks/gates`: a line for each configuration."""
    lines = [f"{json.dumps(row)}: {json.dumps(found)}" for row, found in rows.items()]
    text = ",\n".join(lines)
    write_atomically(FOLDER / name, f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
