"""Tests of pages that show the results of a record in tables, at most 80 characters wide."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.experiments.row import Row
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.numbers.metrics import DISTURBED
from reproduce.records.record import Engine, Record, Result
from reproduce.tables.all import document, tables
from reproduce.tables.layout import WIDTH

from ..made import RUN, one_line, ran
from ..made import record as made_record

MiB, GiB = 2**20, 2**30
LACKING = "needs devices"
CUDA_RUN: dict[str, Any] = {
    "seed": 7,
    "device": "cuda",
    "devices": 8,
    "load": [0.5, 0.25, 1.0],
    "git": Git("0123456789abcdef", dirty=True),
    "machine": Machine("Linux", "a CPU", 4, 8, 64 << 30, [Gpu("Tesla P40", 22 << 30)] * 8),
}


def record(*results: Result, **run: Any) -> Record:
    fields = {**CUDA_RUN, **run}
    return made_record(*results, **fields)


def full(row: Row) -> list[float]:
    """Return a utilization of 100% for each device of a row (configuration)."""
    return [1.0] * row.devices


def observed(
    name: str, scale: str, steps: Sequence[float] = (100.0, 50.0), **values: Any
) -> Record:
    """Make a record whose rows all have the same numbers; `values` replaces some usual numbers."""

    def one_gib(row: Row) -> list[int]:
        return [GiB] * row.devices

    given: dict[str, Any] = {"utilization": full, "bubble": 0.5, "peak_allocated": one_gib}
    return record(*ran(name, scale, lambda row: steps, **{**given, **values}))


def memory(scale: str, device: str, peak: Callable[[int], list[int]], **values: Any) -> Record:
    """Make a record of an experiment about memory, with counted sizes of models and given peaks.

    The function `peak` takes the number of devices, and returns the peak bytes of each device.
    """
    parameters = 1_844_858_344
    exact: dict[str, Any] = {"parameters": parameters, "model_bytes": 12 * parameters}
    peaks = {**exact, "peak_allocated": lambda row: peak(row.devices), **values}
    counted = ran("amoebanet-memory", "paper", lambda row: [], "meta", **exact)
    measured = ran("amoebanet-memory", scale, lambda row: [], device, **peaks)
    return record(*counted, *measured)


def gpipe_is_faster(row: Row) -> Sequence[float] | str:
    if row.partitions == 8:
        return "needs devices"
    speeds = {"naive": 16.0, "checkpoint-only": 12.8, "GPipe": 32.0}
    speed = speeds.get(row.configuration, 20.0)
    return [speed, speed / 2, speed / 4]


def emulated_faster_still(row: Row) -> Sequence[float]:
    """Return made-up emulated samples/s of three steps. GPipe is faster on more devices."""
    speeds = {"naive": 16.0, "checkpoint-only": 12.8, "GPipe": 12.0 * row.devices}
    other = 10.0 if row.published else 5.0
    speed = speeds.get(row.configuration, other * row.devices)
    return [speed, speed / 2, speed / 4]


def both(name: str, scale: str, **options: Any) -> list[Result]:
    """Make emulated results for all rows, and measured results for rows on up to 7 devices."""
    measured = ran(name, scale, lambda row: None if row.partitions == 8 else gpipe_is_faster(row))
    emulated = ran(name, scale, emulated_faster_still, emulated=True, **options)
    return measured + emulated


MEASURED = ran("amoebanet-speed", "paper", gpipe_is_faster)
SPEED = record(*MEASURED)
EMULATED = record(*both("amoebanet-speed", "paper"), device="cpu", threads_per_device=1, load=None)
LIVE = memory("small", "cpu", lambda n: [(100 + j) * MiB for j in range(n)], model_bytes=50 * MiB)
ON_ONE_GPU = memory(
    "paper",
    "cuda",
    lambda n: [20 * GiB] * n,
    peak_reserved=lambda row: [21 * GiB] if row.devices == 1 else [],
)
CUDA = memory("paper", "cuda", lambda n: [20 * GiB] * n, peak_reserved=[21 * GiB])


def busy(made: Record) -> Record:
    """Return a copy of a record in which other programs used 20% of the cores in each result."""
    results = []
    for result in made.results:
        samples = {**result.samples, "others": [0.2]}
        results.append(replace(result, samples=samples))
    return replace(made, results=results)


UNKNOWN = observed("unet-speed", "paper", utilization=None, utilization_problem="no pynvml")


def lacking(status: str) -> Record:
    """Make a record in which rows on four devices have a status like "failed" and no numbers."""
    results = ran("amoebanet-speed", "paper", lambda row: status if row.partitions == 4 else [1.0])
    for result in LIVE.results:
        if result.row == "pipeline-4":
            result = replace(result, status=status, values={})
        if result.scale == "small":
            results.append(result)
    return record(*results)


def changed(row: str, emulated: bool = True, **changes: Any) -> Record:
    """Return a copy of the record `EMULATED` with new values for fields of one row's result."""
    results = []
    for result in EMULATED.results:
        if result.row == row and result.emulated == emulated:
            result = replace(result, **changes)
        results.append(result)
    return replace(EMULATED, results=results)


def trained(
    scale: str, given: Mapping[str, Sequence[float]], epochs: int = 90, **ended: Any
) -> Record:
    """Make a record of an accuracy experiment.

    Args:
        scale: The scale (set of sizes) of the rows (configurations).
        given: For each trained row, the errors after the last epoch, one for each random seed.
            A row that is missing here counts as not run, for lack of devices.
        epochs: The largest number of epochs that a training has finished.
        ended: New values for fields, such as `status`, of the results of trained rows.
    """
    results = []
    made = ran("resnet101-accuracy", scale, lambda row: [] if row.name in given else LACKING)
    for result in made:
        count = min(epochs, result.config["epochs"])
        samples: dict[str, list[int | float]] = {}
        for error in given.get(result.row, []):
            samples.setdefault("epoch", []).extend(range(1, count + 1))
            samples.setdefault("epoch_time", []).extend([2.0] * count)
            samples.setdefault("top1_error", []).extend([90.0] * (count - 1) + [error])
        changes = ended if result.row in given else {}
        values = {"samples_per_epoch": 1000}
        results.append(replace(result, samples=samples, values=values, **changes))
    return record(*results)


def by(
    engine: Engine, speeds: Mapping[str, list[float] | str], emulated: bool = False
) -> list[Result]:
    """Make results of an engine. For each row, `speeds` has the samples/s or the status."""
    rows = ran("amoebanet-speed", "small", lambda row: speeds.get(row.name), emulated=emulated)
    return [replace(each, engine=engine) for each in rows]


THREADS = by("threads", {"naive n2": [1.0], "GPipe n2m4": [1.0, 2.0, 1.0]})
EMULATED_THREADS = by("threads", {"GPipe n2m4": [8.0]}, emulated=True)
ALONE = by("ranks", {"GPipe n2m4": [2.0]})
RANKS = by("ranks", {"GPipe n2m4": [2.0, 1.0, 4.0], "naive n2": "not run", "GPipe n8m4": LACKING})
SCHEDULE = by("Schedule1F1B", {"GPipe n2m4": "failed", "naive n2": "not run"})
ENGINES = record(*THREADS, *EMULATED_THREADS, *RANKS, *SCHEDULE)
TWO_THREADS = replace(RUN, threads_per_device=2)
TOO_LONG = "not measured: a step would take about 9 min"
NO_ROOM = "out of memory: its 4 partition(s) take 99 GiB"
FEW_DEVICES = [each for each in EMULATED.results if "n8" not in each.row]
NAIVE_ON_EIGHT = [each for each in MEASURED if each.row == "naive n8"]
NO_LOAD = "NOT in the minute before the start"
TRAINED = trained("paper", {"dataparallel-256": [22.0], "pipeline-256": [22.5]})


def ended(status: str) -> Record:
    """Make a record of two trainings that stopped after two epochs, with the given status."""
    errors = {"plain": [3.0], "GPipe n2m2": [3.0]}
    return trained("small", errors, 2, status=status, reason="no luck")


# Records, and words that their pages must contain. Words after NOT must be missing.
PAGES: list[tuple[Record, list[str]]] = [
    (
        SPEED,
        [
            "| naive | 2 | 1 | 8.00 (6.00-12.0) | 1 |",
            "| GPipe | 2 | 4 | 16.0 (12.0-24.0) | 2.00 (2.00-2.00) |",
            "| checkpoint-only | 1 | 32 | 6.40 (4.80-9.60) | 0.80 (0.80-0.80) |",
            "| GPipe | 8 | 32 | needs 8 devices | |",
            "rows not run for want of devices",
            "| samples/s (quartiles) |",
            "NOT emulated",
            "scale paper: AmoebaNet-D (18, 256), input 3 x 224 x 224; batch size 64; "
            "3 steps per row",
            "Speed-ups are over the naive row of the same n (checkpoint-only: of n=2). "
            "A speed-up is computed for each round, and the table has the median.",
            "# Title",
            "on 8 CUDA devices",
            "a CPU, 4 cores, 64 GiB of memory, Tesla P40 (22 GiB)",
            "torch 2.11.0; git revision 0123456789ab with changes",
            "seed 7; load at start 0.50 0.25 1.00",
        ],
    ),
    (
        EMULATED,
        [
            "NOT samples/s (quartiles)",
            # The row ends with the measured speed-up, the emulated and published samples/s, the
            # emulated and published speed-up, and the ratio of emulated to measured samples/s.
            "| n4m4 | 360 | except_last | 1.00 | 20.0 | 44.5 | 2.00 | 1.67 | 2.00 |",
            "| speed-up measured | samples/s emulated | published | speed-up emulated |",
            "| m | over naive measured | samples/s emulated | over naive emulated (quartiles) |",
        ],
    ),
    (busy(SPEED), ["| GPipe | 2 | 4 | 16.0* (12.0-24.0) | 2.00* (2.00-2.00) |", DISTURBED]),
    (UNKNOWN, ["| baseline | - | - | 50% |", "no utilization: no pynvml"]),
    (
        observed("unet-ablation", "paper", [100.0], peak_reserved=[5 * GiB]),
        [
            "| dep-x-x | x-- | 100 | 1.00 | 1.35 | 100% | 59% | 5.00 | 19.1 |",
            "published on 4 x NVIDIA Tesla P40: U-Net (5, 64), reserved memory",
        ],
    ),
    (
        CUDA,
        [
            "| pipeline-2 | (18, 544) | 20.00 20.00 | 40.00 | 20.62 | 19.38 |",
            "| pipeline-1 | (18, 416) | 21.00 | 21.00 | 20.62 | 0.38 |",
        ],
    ),
    (memory("small", "cpu", lambda n: []), ["| pipeline-1 | (18, 32) | - |"]),
    (
        ON_ONE_GPU,
        [
            "| pipeline-2 | (18, 544) | - |",
            "one GPU took their place: there, allocated bytes are the bytes of all tensors alive",
        ],
    ),
    (
        lacking("out of memory"),
        ["| GPipe | 4 | 4 | out of memory | |", "| pipeline-4 | (36, 40) | out of memory | | | |"],
    ),
    (
        lacking("failed"),
        [
            "| GPipe | 4 | 4 | failed | |",
            "| pipeline-4 | (36, 40) | failed | | | |",
            "failed: naive n4, GPipe n4m4, GPipe n4m32: needs",
            "failed: pipeline-4: ",
        ],
    ),
    (
        lacking(LACKING),
        [
            "| GPipe | 4 | 4 | needs 4 devices | |",
            "| pipeline-4 | (36, 40) | needs 4 devices | | | |",
            "not run for want of devices",
        ],
    ),
    (record(*MEASURED, device="cpu", load=[0.9, 9, 9]), [NO_LOAD]),
    (record(*MEASURED, device="cpu", load=None), [NO_LOAD]),
    (record(*MEASURED, device="cuda", load=[9, 9, 9]), [NO_LOAD]),
    (
        replace(EMULATED, run=TWO_THREADS),
        ["a measured device is 2 threads and an emulated one is one: "],
    ),
    (replace(SPEED, run=TWO_THREADS), ["NOT a measured device is 2 threads"]),
    (changed("naive n4", False, status="not run", reason=TOO_LONG), [f"naive n4: {TOO_LONG}"]),
    (
        changed("naive n4", status="out of memory", reason=NO_ROOM),
        [f"failed: naive n4: {NO_ROOM}"],
    ),
    (changed("naive n4", values={"executed": 4}), ["at most 4 micro-batches of a step"]),
    (
        replace(EMULATED, results=FEW_DEVICES + NAIVE_ON_EIGHT),
        ["1 row not run for want of devices"],
    ),
    (
        TRAINED,
        [
            "| reference-8k | needs 256 devices | | 22.36 +- 0.09 |",
            "| dataparallel-4k | needs 8 devices | | out of m",
            "| pipeline-256 | 22.50 | +0.50 | 21.99 +- 0.13 |",
            "no verdict: train more by --seeds K",
            "reference rows by Goyal et al., arXiv:1706.02677",
            "| dataparallel-256 | 256 | 2 | - | plain | 500 | 180 |",
            "| pipeline-1k | 1024 | 8 | 64 | plain | | 295 |",
        ],
    ),
    (
        ended("measured"),
        [
            "| plain | epoch 2 of 6 |",
            "| GPipe n2m2 | epoch 2 of 6 |",
            "| GPipe n2m4 | needs 2 devices |",
            "NOT no luck",
        ],
    ),
    (
        ended("failed"),
        [
            "| plain | failed |",
            "| GPipe n2m2 | failed |",
            "| GPipe n2m4 | needs 2 devices |",
            "failed: plain, GPipe n2m2: no luck",
        ],
    ),
    (
        ENGINES,
        [
            "| row | threads | ranks | over threads | Schedule 1F1B |",
            "| naive n2 | 1.00 | - | | - |",
            "| GPipe n2m4 | 1.00 | 2.00 | 2.00 | failed |",
            "| GPipe | 2 | 4 | 1.00 | 8.00 |",
            "ranks, Schedule1F1B: needs 2 devices (naive n2, GPipe n2m4)",
            "1 row not run for want of devices",
        ],
    ),
    (
        record(*ALONE),
        ["| row | ranks |", "| GPipe n2m4 | 2.00 |", "NOT over threads"],
    ),
    (record(*THREADS), ["NOT of each engine"]),
]
# Records with the widest numbers, which only test the width of the tables.
TIMED = ("amoebanet-speed", "unet-speed", "unet-ablation", "resnet101-speed")
NAMES = list(product(TIMED, ("paper", "small")))
WIDE = [observed(name, scale) for name, scale in NAMES]
WIDE += [busy(record(*both(name, scale, utilization=full, bubble=0.5))) for name, scale in NAMES]
WIDE += [
    record(*ran("amoebanet-speed", "paper", lambda row: [132.413, 199.9, 100.1])),
    memory("paper", "cuda", lambda n: [int(139.9 * GiB)] * n, peak_reserved=[139 * GiB] * 8),
    memory("small", "cpu", lambda n: [9999 * MiB] * n),
]
PAGES += [(made, []) for made in WIDE]


@pytest.mark.parametrize(("made", "said"), PAGES)
def test_what_a_page_says(made: Record, said: list[str]) -> None:
    """Check that a page contains the expected words, and that each table fits into a terminal."""
    page = document(made)
    shown = tables(made)

    flat = one_line(page)
    for words in said:
        expected = not words.startswith("NOT ")
        assert (words.removeprefix("NOT ") in flat) == expected
    assert page.count("\n## ") == len(shown)
    for table in shown:
        text = table.text()
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= WIDTH
