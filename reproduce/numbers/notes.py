"""Write the notes below the table of a comparison.

The notes say which numbers cannot be compared, how rows (configurations) on the same line differ,
and which rows are missing.
"""

from collections.abc import Collection, Iterator, Sequence

from reproduce.numbers.match import Line, differing, same_work
from reproduce.numbers.metrics import available, outcome
from reproduce.numbers.sources import Entry, Side
from reproduce.numbers.unmatched import Unmatched, unmatched
from reproduce.records.record import SUCCESS

TIMES = ("throughput", "speedup", "time", "step_time")  # the metrics that depend on the machine
HINT = "; --all names them"
IN_TURN = (
    "python -m reproduce regression --base REV --head REV runs the code of two revisions, in turn"
)
Lines = Sequence[Line]
Sides = Sequence[Side]


def unfair(lines: Lines, metric: str) -> str:
    """Return why absolute numbers of a metric cannot be compared; an empty text if they can."""
    reasons: dict[str, None] = {}
    for first, other in _pairs(lines):
        if metric in TIMES and _machine(first) != _machine(other):
            reasons["the sides ran on different machines"] = None
        elif metric in TIMES and _threads(first) != _threads(other):
            reasons["the sides ran with different numbers of threads for each device"] = None
        if not same_work(first, other):
            reasons["matched rows did different work"] = None
    return " and ".join(reasons)


def other_differences(lines: Lines) -> list[str]:
    """Return notes on how matched rows (rows on the same line of a comparison's table) differ.

    The rows can differ in their scales (sets of sizes), in settings, and in versions of software.
    """
    scales: dict[str, None] = {}
    fields: list[str] = []
    versions: dict[str, dict[str, None]] = {}
    for first, other in _pairs(lines):
        fields += differing(first, other)
        one_scale = first.result.scale
        other_scale = other.result.scale
        if one_scale and other_scale and one_scale != other_scale:
            scales |= {one_scale: None, other_scale: None}
        run = first.record.run
        other_run = other.record.run
        if run is None or other_run is None:
            continue
        theirs = other_run.versions
        for name, version in run.versions.items():
            if version != theirs.get(name):
                seen = versions.setdefault(name, {})
                seen[str(version)] = None
                seen[str(theirs.get(name))] = None
    notes = []
    if scales:
        notes.append(f"scale differs: {' / '.join(scales)}")
    if fields:
        notes.append(f"matched rows also differ in: {once(fields)}")
    notes += [f"{name} differs: {' / '.join(both)}" for name, both in versions.items()]
    return notes


def other_times(sides: Sides, lines: Lines) -> list[str]:
    """Return a list with a note if the compared runs took place at different times, else [].

    The note says that the comparison cannot show why the runs differ: the cause may be the time.
    """
    if not _at_other_times(lines):
        return []
    unknown = [side.letter for side in sides if _load_is_unknown(side)]
    how = ""
    if unknown:
        letters = " and ".join(unknown)
        how = f"; how busy others kept the machine is not known of {letters}"
    return [
        "the sides ran at different times: a verdict says that these runs differ, not "
        f"why{how}; {IN_TURN}"
    ]


def missing(sides: Sides, lines: Lines, have: Sequence[set[int]], every: bool) -> list[str]:
    """Return notes on the rows for which a side (such as a run) has no number, with the reasons.

    Args:
        sides: The sides that are compared.
        lines: The lines of the table.
        have: For each line, the indices of the sides that have a number.
        every: Whether a note names all its rows. Otherwise, it says how many rows there are.
    """
    pairs = unmatched(lines, len(sides))
    told = set()
    for pair in pairs:
        told |= {(id(pair.line), pair.side), (id(pair.other), 0)}
    labels: dict[str, list[str]] = {}
    for line, known in zip(lines, have, strict=True):
        letters: dict[str, list[str]] = {}
        for number, side in enumerate(sides):
            if number not in known and (id(line), number) not in told:
                problem = problem_of(line.entries.get(number))
                letters.setdefault(problem, []).append(side.letter)
        for problem, where in letters.items():
            what = f"{problem} in {' and '.join(where)}"
            labels.setdefault(what, []).append(line.label)
    hint = "" if every else HINT
    notes = [f"{what}: {named(rows, every)}{hint}" for what, rows in labels.items()]
    return other_fields(sides, pairs, every) + notes


def other_fields(sides: Sides, pairs: Sequence[Unmatched], every: bool) -> list[str]:
    """Return notes on rows (configurations) that cannot be compared, because their settings differ.

    The compared results are called sides, such as a run or a published table. The first side is
    called A.

    Args:
        sides: The sides.
        pairs: Pairs of a row of side A and a row of another side. The two rows have the same name,
            but different settings.
        every: Whether a note names all its rows. Otherwise, it says how many rows there are.
    """
    labels: dict[str, list[str]] = {}
    for pair in pairs:
        what = f"A and {sides[pair.side].letter} differ in {pair.text}"
        labels.setdefault(what, []).append(pair.line.label)
    hint = "" if every else HINT
    return [f"{what}: {named(rows, every)}{hint}" for what, rows in labels.items()]


def nothing_shared(sides: Sides, lines: Lines, metric: str | None, every: bool) -> str:
    """Return a note about an experiment in which no row (configuration) can be compared.

    No row has values of the same metric on two sides (such as runs). The note gives the first of
    these reasons that applies:

    1. Rows of the same name have different settings. The note names these settings.
    2. No row has the same configuration on two sides. The note says how many rows each side has.
    3. The user chose a metric that no row has on two sides.
    4. The sides have different metrics. The note lists the metrics of each side.
    """
    experiment = lines[0].experiment
    pairs = unmatched(lines, len(sides))
    if pairs:
        return f"{experiment}: {'; '.join(other_fields(sides, pairs, every))}"
    if all(len(line.entries) == 1 for line in lines):
        rows = []
        for number, side in enumerate(sides):
            labels = [line.label for line in lines if number in line.entries]
            if labels:
                rows.append(f"{side.letter} has {named(labels, every)}")
        hint = "" if every else HINT
        what = "no row has the same configuration on two sides"
        return f"{experiment}: {what}: {'; '.join(rows)}{hint}"
    if metric is not None:
        return f"{experiment}: {metric} is not on two sides of any row"
    has = []
    for number, side in enumerate(sides):
        entries = [line.entries[number] for line in lines if number in line.entries]
        if entries:
            metrics = ", ".join(available(entries)) or "no number"
            has.append(f"{side.letter} has {metrics}")
    return f"{experiment}: no row has the same metric on two sides: {'; '.join(has)}"


def named(labels: Sequence[str], every: bool) -> str:
    """Return the names of rows as a text or, if `every` is false, only how many rows there are."""
    return once(labels) if every else count(labels)


def count(labels: Collection[str]) -> str:
    """Return the number of rows, such as `1 row` or `2 rows`."""
    plural = "" if len(labels) == 1 else "s"
    return f"{len(labels)} row{plural}"


def once(labels: Sequence[str]) -> str:
    """Join labels by commas, and leave out repeated labels."""
    return ", ".join(dict.fromkeys(labels))


def _pairs(lines: Lines) -> Iterator[tuple[Entry, Entry]]:
    """Yield all pairs of rows to compare: a line's first row, and another row of this line."""
    for line in lines:
        first, *others = line.entries.values()
        for other in others:
            yield first, other


def _machine(entry: Entry) -> object:
    """Return a value that identifies the machine of a row: its CPU, its GPUs and so on.

    Absolute times of two rows are comparable only if this value is equal for both, and the number
    of threads for each device, too.
    """
    record = entry.record
    run = record.run
    if run is None:
        return entry.result.hardware or record.hardware or record.name
    machine = run.machine
    memory = machine.memory and machine.memory >> 30
    gpus = [gpu.name for gpu in machine.gpus]
    return machine.cpu, machine.cores, memory, gpus, run.device


def _threads(entry: Entry) -> int | None:
    run = entry.record.run
    return None if run is None else run.threads_per_device


def _at_other_times(lines: Lines) -> bool:
    for first, other in _pairs(lines):
        run = first.record.run
        other_run = other.record.run
        if run is not None and other_run is not None and run.started != other_run.started:
            return True
    return False


def _load_is_unknown(side: Side) -> bool:
    """Return whether it is unknown how busy other programs were while a side was measured.

    It is unknown if no result of the side has measurements of the machine's load.
    """
    ran = False
    for record in side.records:
        if record.run is None:
            continue
        for result in record.results:
            ran = True
            if "others" in result.samples:
                return False
    return ran


def problem_of(entry: Entry | None) -> str:
    """Return a text that says why a side (such as a run) has no number for a row."""
    if entry is None:
        return "missing"
    if entry.result.status in SUCCESS:
        return "no number"
    return f"no number ({outcome(entry.result)})"
