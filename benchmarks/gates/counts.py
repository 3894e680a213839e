"""Count the operations of a training step, and compare the counts with `counts.json`.

    python -m benchmarks.gates.counts             # exit with 1 if a count differs from the file's
    python -m benchmarks.gates.counts --update    # write the file, if the change is intended
    python -m benchmarks.gates.counts --base main # compare with the git revision `main`

Unlike times, counts are the same in each run. `benchmarks.gates.counted` says what is counted, and
`benchmarks.gates.tally` says how. A count that has become lower also has to be written to the file.
Otherwise, nobody would notice if the count later rose to its old value.

The file `orders.json` has the order in which each device runs its tasks. The program compares this
order, too.

The option `--base` names a git revision, or a folder with another torchgpipe. The program then also
counts the operations of this other version, the base, and compares with it in place of the files. A
count may be lower than in the base, but not higher. The order of tasks must be the same. If the
base cannot be counted, the program says so, and compares with the files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from benchmarks.gates.answer import answer, called
from benchmarks.gates.base import Base, add_base, numbers_of
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
BASE = "the base"
ADVICE = (
    "If this is meant, run python -m benchmarks.gates.counts --update, "
    f"and commit benchmarks/gates/{COUNTS} and {ORDERS}."
)

Totals = dict[str, int]
Orders = Mapping[str, list[str]]
"""Maps the name of a configuration to the tasks of each device, in the order in which they run."""


def differences(
    before: Mapping[str, Totals],
    counted: Mapping[str, "Counts"],
    reference: str = COUNTS,
    *,
    lower: bool = True,
) -> list[str]:
    """Return a line of text for each count that differs from the count in `before`.

    A configuration that is missing in `before` or in `counted` also gets a line.

    Args:
        before: Maps the name of a configuration to its counts in the committed file, or in another
            version of the library.
        counted: Maps the name of a configuration to what was counted in this run.
        reference: The name of `before` in the lines, such as "the base".
        lower: Whether a count that has become lower also gets a line.
    """
    lines = _missing(reference, before, counted)
    for name, counts in counted.items():
        if name not in before:
            continue
        for what, now in counts.totals().items():
            then = before[name].get(what, 0)
            if now > then or (lower and now < then):
                change = "grew" if now > then else "fell"
                line = f"{name}: {what} {change} from {then} to {now}"
                if what == "operators":
                    line += f"; in all {_listed(counts.operators)}"
                lines.append(line)
    return lines


def other_orders(before: Orders, noted: Orders, reference: str = ORDERS) -> list[str]:
    """Return a line of text for each device whose order of tasks differs from that in `before`.

    The line says from which task on the order differs. A configuration that is missing in `before`
    or in `noted` also gets a line.

    Args:
        before: The orders to compare with.
        noted: The orders of this run.
        reference: The name of `before` in the lines, such as "the base".
    """
    lines = _missing(reference, before, noted)
    for name in noted.keys() & before.keys():
        for device, (then, now) in enumerate(zip(before[name], noted[name], strict=True)):
            old, new = then.split(), now.split()
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


def _missing(reference: str, before: Iterable[str], now: Iterable[str]) -> list[str]:
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    lines = [f"{name}: in {reference}, but no longer counted" for name in gone]
    return lines + [f"{name}: counted, but not in {reference}" for name in new]


def _listed(operators: Mapping[str, int]) -> str:
    counts = [f"{n:+} {operator}" for operator, n in sorted(operators.items()) if n]
    return ", ".join(counts)


class Before(NamedTuple):
    """The counts and the orders to compare with.

    Attributes:
        counts: Maps the name of a configuration to its counts.
        orders: Maps the name of a configuration to the order of each device's tasks.
        committed: Whether the counts and orders are from the committed files. Otherwise, they are
            from the base, another version of the library.
        remark: If the user has named a base that cannot be counted, a text that says so. Otherwise
            empty.
    """

    counts: Mapping[str, Totals]
    orders: Orders
    committed: bool = True
    remark: str = ""


def main(arguments: list[str] | None = None) -> None:
    """Count the operations of all configurations, note the orders of tasks, and judge them.

    They are compared with the committed files or, with the option --base, with another version of
    the library. With the option --update, they are written into the files, and not judged.

    Raises:
        Worse: A count or an order is worse.
        Error: The pipeline does not run, or a committed file is missing or broken.
    """
    parser = command("gates.counts", __doc__, record=False)
    parser.add_argument("--update", action="store_true", help="write what is counted now")
    add_base(parser, "another version of torchgpipe to compare with, in place of the files")
    options = parser.parse_args(arguments)
    if options.update and options.base is not None:
        parser.error("--update writes the committed files, and --base ignores them: give only one")
    before = of_files(optional=options.update) if options.base is None else of_base(options.base)
    with in_one_line("counts"):
        counted, noted = count_all()

    changes = _changes(before, counted, noted)
    said = f"{len(counted)} counts and {len(noted)} orders"
    if options.update:
        now = Before({name: each.totals() for name, each in counted.items()}, noted)
        _write(COUNTS, now.counts)
        _write(ORDERS, now.orders)
        told = [*changes, f"{said}: {'written' if changes else 'as committed'}"]
        answer(options.format, _numbers(now, counted, noted), told, [])
        return
    remarks = [before.remark] if before.remark else []
    ending = "as committed" if before.committed else "none is worse than in the base"
    told = [*remarks, *changes, f"{said}: {ending}"]
    lost: list[str] = []
    if before.committed and changes:
        lost = [*remarks, *changes, ADVICE]
    elif not before.committed and _changes(before, counted, noted, lower=False):
        lost = changes
    answer(options.format, _numbers(before, counted, noted), told, lost)


def _changes(
    before: Before, counted: Mapping[str, "Counts"], noted: Orders, *, lower: bool = True
) -> list[str]:
    """Return a line for each count and each order of tasks that differs from that in `before`.

    `lower` says whether counts that have become lower also get a line.
    """
    counts, orders = (COUNTS, ORDERS) if before.committed else (BASE, BASE)
    lines = differences(before.counts, counted, counts, lower=lower)
    return lines + other_orders(before.orders, noted, orders)


def of_files(*, optional: bool = False) -> Before:
    """Return the counts and the orders of the committed files.

    Args:
        optional: Whether to return an empty result, and not to raise an error, if a file is
            missing or broken.

    Raises:
        Error: A file is missing or broken.
    """
    try:
        counts = decode(dict[str, Totals], read_json(FOLDER / COUNTS), COUNTS)
        orders = decode(dict[str, list[str]], read_json(FOLDER / ORDERS), ORDERS)
    except Error as error:
        if optional:
            return Before({}, {})
        update = "write it by python -m benchmarks.gates.counts --update"
        raise Error(f"counts: {error}; {update}") from None
    return Before(counts, orders)


def of_base(base: Base) -> Before:
    """Return the counts and the orders of the base, another version of the library.

    If the base cannot run the configurations, return those of the committed files, with a remark.

    Raises:
        Error: The base cannot run the configurations, and a committed file is missing or broken.
    """
    try:
        numbers = numbers_of(base, "benchmarks.gates.counts")
    except Error as error:
        return of_files()._replace(
            remark=f"{error}, so the counts and orders are compared with the committed files"
        )
    counts: dict[str, Totals] = {}
    orders: dict[str, list[str]] = {}
    for number in numbers:
        name = str(number["row"])
        if number["experiment"] == "orders":
            orders[name] = cast(list[str], number["value"])
        else:
            counts.setdefault(name, {})[str(number["metric"])] = cast(int, number["value"])
    return Before(counts, orders, committed=False)


def _numbers(before: Before, counted: Mapping[str, "Counts"], noted: Orders) -> Iterator[Number]:
    """Yield an entry for each count in `counted` and each order in `noted`, for CSV and JSON.

    The verdict on a count is "worse" if the count is higher than in `before`, or if `before` does
    not have the configuration. A count that is lower than in the committed files is "worse", too.
    """
    for name, counts in counted.items():
        about: Number = {"experiment": "counts", "row": name, "kind": "measured"}
        old = before.counts.get(name, {})
        for what, now in counts.totals().items():
            then = old.get(what, 0)
            lost = name not in before.counts or now > then or (before.committed and now < then)
            yield {**about, "metric": what, "unit": "count", "value": now, "verdict": called(lost)}
    yield from _orders(before.orders, noted)


def _orders(before: Orders, noted: Orders) -> Iterator[Number]:
    """Yield an entry for each configuration, with the order of its tasks, for CSV and JSON.

    The order is a list that has, for each device, a text such as "0a 1a B0a B1a". The entry's
    verdict is "worse" if the order differs from that in `before`.
    """
    for name, now in noted.items():
        about: Number = {"experiment": "orders", "row": name, "kind": "measured"}
        verdict = called(before.get(name) != now)
        yield {**about, "metric": "order", "value": now, "verdict": verdict}


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
