"""Measure the overhead of the library on a GPU, compared with a plain loop and other versions."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import chain, product
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gates.base import version
from benchmarks.gpu.part import Context, Fields
from reproduce.machine.description import ROOT
from reproduce.records.record import Result
from reproduce.regression.job import in_turn

PURPOSE = "what a task costs the host, and how long the device is idle for each task"
SHARE = 3.5
NEEDS: tuple[str, ...] = ()

AMOEBANET = "AmoebaNet-D (18, 256)"
PLAIN, HERE, OTHER = "plain loop", "this library", "other"
UNIT = {"host": "us/task", "step": "us/task", "idle": "us/task", "waits": "a step"}
NAMED = 3
"""How many faults, and how many failures, the page names. The result has all of them."""
FEW_TASKS = 8
"""A step with more tasks than this is timed fewer times, since it has more to tell of a task."""


class Case(NamedTuple):
    """A model with n partitions and m micro-batches, and how often its steps are timed.

    A plain loop and one or two versions of torchgpipe run the model, and take turns.

    Attributes:
        samples: The number of samples in a micro-batch.
        rounds: The number of turns of the loop, and of each torchgpipe.
        steps: The number of steps that are timed in one turn.
    """

    model: str
    checkpoint: str
    n: int
    m: int
    samples: int = 1
    rounds: int = 4
    steps: int = 5

    def __str__(self) -> str:
        size = "" if self.samples == 1 else f" of {self.samples}"
        return f"{self.model} n={self.n} m={self.m}{size} {self.checkpoint}"


# AmoebaNet-D has the micro-batch sizes of its speed table. There, a micro-batch has 4 samples in
# rows (configurations) that are only for comparison, and 40 in the published rows n2m32 and n8m32.
OF_4 = [
    Case(AMOEBANET, "never", 8, 8, 4, 2, 1),
    Case(AMOEBANET, "never", 1, 8, 4, 2, 1),
    Case(AMOEBANET, "except_last", 2, 8, 4, 2, 1),
    Case(AMOEBANET, "always", 4, 8, 4, 2, 1),
]
LONG = [
    Case(AMOEBANET, "always", 1, 8, 4, 2, 1),
    Case(AMOEBANET, "except_last", 8, 8, 40, 2, 1),
    Case(AMOEBANET, "except_last", 8, 32, 4, 2, 1),
]
TINY = [
    Case("linear", "never", 2, 2, 1, 2, 1),
    Case("linear", "always", 2, 2, 1, 2, 1),
    Case("AmoebaNet-D", "except_last", 2, 2, 1, 1, 1),
]


def _cases() -> list[Case]:
    """Return all cases in the order in which they are measured, the most important ones first."""
    linear: dict[str, list[Case]] = {}
    for checkpoint in ("never", "always", "except_last"):
        linear[checkpoint] = []
        for n, m in product((1, 2, 4, 8), (1, 8, 32)):
            steps = 5 if n * m <= FEW_TASKS else 2
            linear[checkpoint].append(Case("linear", checkpoint, n, m, steps=steps))
    return [*linear["never"], *OF_4, *linear["always"], *linear["except_last"], *LONG]


def run(context: Context) -> Fields:
    """Measure one case after another until no time is left; return and save the results."""
    cases = {str(case): case for case in (_cases() if context.size == "paper" else TINY)}
    device = str(context.devices[0])
    folders = [ROOT]
    if context.against is not None:
        folders.append(context.against)
    versions = [version(folder) for folder in folders]
    asked = []
    for name, case in cases.items():
        ways = _ways(case, device, beside=len(folders) > 1)
        asked.append({"name": name, "ways": ways, "rounds": case.rounds, "steps": case.steps})
    job = {"folders": list(map(str, folders)), "cases": asked}
    result: Fields = {"planned": len(cases), "versions": versions, "cases": {}, "faults": []}
    record = context.new_record("time per task on a GPU", UNIT, [])
    with closing(in_turn(job, {}, "benchmarks.gpu.issued")) as lines:
        for line in lines:
            name = line["case"]
            found = _found(line)
            result["cases"][name] = found
            result["faults"] += faults(name, found)
            context.write(result)
            record.results.extend(_results(name, cases[name], found, versions))
            context.save(record)
            if context.seconds_left() < 0:
                break
    return result


def _ways(case: Case, device: str, *, beside: bool) -> dict[str, tuple[int, list[Any]]]:
    """Return the ways to run a case: with a plain loop, and with one or two torchgpipe versions.

    Each way has the index of the version's folder, and the fields of
    `benchmarks.gates.machinery_child.Way`.

    Args:
        case: The case (a model with its numbers of partitions and micro-batches).
        device: The device of all partitions.
        beside: Whether to run the case also with the other torchgpipe version.
    """
    engines: dict[str, tuple[int, str | None]] = {PLAIN: (0, "plain"), HERE: (0, "graph")}
    if beside:
        engines[OTHER] = (1, None)  # torchgpipe 0.0.7 has only one engine
    ways: dict[str, tuple[int, list[Any]]] = {}
    for way, (side, engine) in engines.items():
        fields = [case.model, case.n, case.m, case.checkpoint, device, engine, case.samples]
        ways[way] = side, fields
    return ways


def _found(line: Mapping[str, Any]) -> dict[str, Fields]:
    """Read the line that `benchmarks.gpu.issued` printed about the measurement of a case.

    Return a dictionary. A key is a way to run the case: a plain loop, or a version of torchgpipe.
    The value for this key has the measured numbers, such as "host" and "step" in microseconds per
    task. If nothing was measured, the value has the reason.
    """
    found: dict[str, Fields] = {way: {"reason": why} for way, why in line.get("unable", {}).items()}
    for way, turns in line.get("samples", {}).items():
        steps = chain.from_iterable(turns)
        hosts, whole, elapsed = zip(*steps, strict=True)
        values = {"host": 1e6 * median(hosts), "step": 1e6 * median(whole)}
        profile = line["profiles"].get(way, [{}])[0]
        failed = profile.get("failed") or line["not profiled"].get(way)
        if "busy" in profile and None not in elapsed:
            values["idle"] = 1e6 * max(0.0, median(elapsed) - profile["busy"])
        if "waits" in profile:
            values["waits"] = profile["waits"]
        found[way] = values
        if failed:
            found[way]["not profiled"] = failed
    return found


def faults(name: str, found: Mapping[str, Fields]) -> list[str]:
    """Return a list with a message if this library made the host wait for the device in a case.

    Such a wait is a fault, because a host that waits cannot launch work for other devices.
    """
    waits = found.get(HERE, {}).get("waits")
    return [f"{name} ({waits} a step)"] if waits else []


def _results(
    name: str, case: Case, found: Mapping[str, Fields], versions: list[str]
) -> Iterator[Result]:
    """Yield the record's results for a case, from the values in `found` that were measured.

    There is one result for the plain loop, and one for each version of torchgpipe.
    """
    config: dict[str, Any] = case._asdict()
    for way, values in found.items():
        config = {**config, "version": versions[way == OTHER]}
        if "reason" in values:
            yield Result(name, way, "failed", reason=values["reason"], config=config)
        else:
            numbers = {unit: values[unit] for unit in UNIT if unit in values}
            yield Result(name, way, "measured", values=numbers, config=config)


def lines(result: Fields) -> list[str]:
    """Say how long a task takes (the median over a model's cases), and if the host had to wait."""
    cases: dict[str, dict[str, Fields]] = result["cases"]
    titles = {PLAIN: PLAIN, HERE: HERE, OTHER: result["versions"][-1]}
    models = dict.fromkeys(name.partition(" n=")[0] for name in cases)
    said = []
    for model in models:
        chosen = [ways for name, ways in cases.items() if name.partition(" n=")[0] == model]
        parts = []
        for value, what in (("host", "issued by the host in"), ("idle", "device idle for")):
            medians = _medians(chosen, value)
            each = [f"{titles[way]} {medians[way]:.0f}" for way in titles if way in medians]
            parts.append(f"{what} {', '.join(each) or '(not measured)'}")
        said.append(f"{model}, us a task, medians over cases ({len(chosen)}): {'; '.join(parts)}")
    said.append("; ".join([*_about_waits(result), *_ended(cases, result["planned"])]))
    return said


def _medians(cases: list[dict[str, Fields]], value: str) -> dict[str, float]:
    """Return medians of a value (such as "host", in microseconds per task) over all cases.

    The dictionary has one median for the plain loop, and one for each version of torchgpipe.
    """
    series: dict[str, list[float]] = {}
    for ways in cases:
        for way, values in ways.items():
            if value in values:
                series.setdefault(way, []).append(values[value])
    return {way: median(values) for way, values in series.items()}


def _about_waits(result: Fields) -> Iterator[str]:
    """Say in which cases this library made the host wait for the device, which is a fault."""
    counted = sum("waits" in ways.get(HERE, {}) for ways in result["cases"].values())
    if result["faults"]:
        named = _first(result["faults"])
        yield f"**FAULT: this library makes the host wait for the device, in {named}**"
    elif counted:
        yield f"this library never makes the host wait for the device, in {counted} cases"
    else:
        yield "whether this library makes the host wait for the device was not counted"


def _ended(cases: Mapping[str, Mapping[str, Fields]], planned: int) -> Iterator[str]:
    """Say how many of the planned cases were measured, which measurements failed, and why."""
    yield f"{len(cases)} of {planned} cases"
    failed = []
    for name, ways in cases.items():
        for way, values in ways.items():
            if "reason" in values:
                failed.append(f"{way} in {name} ({values['reason'][:80]})")
            if "not profiled" in values:
                failed.append(f"profile of {way} in {name} ({values['not profiled'][:80]})")
    if failed:
        yield f"failed: {_first(failed)}"


def _first(said: list[str]) -> str:
    """Join the first `NAMED` texts of a list, and say how many more texts there are."""
    more = f" and {len(said) - NAMED} more" if said[NAMED:] else ""
    return f"{', '.join(said[:NAMED])}{more}"
