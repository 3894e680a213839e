"""Pages of records are computed from them and fit in 80 columns; committed ones equal those made from their records.

A block shows the newest finished run's tables.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.experiments.row import Row
from reproduce.machine.description import ROOT, Gpu, Machine
from reproduce.machine.git import Git
from reproduce.numbers.metrics import DISTURBED, Reading
from reproduce.records.record import Engine, Record, Result, save
from reproduce.tables.all import document, tables
from reproduce.tables.layout import WIDTH, number, ratio, reading_text, span, with_quartiles
from reproduce.tables.render import render, stale

from ..made import RUN, ran
from ..made import record as made_record

MiB, GiB = 2**20, 2**30
CUDA_RUN: dict[str, Any] = {
    "seed": 7,
    "device": "cuda",
    "devices": 8,
    "load": [0.5, 0.25, 1.0],
    "git": Git("0123456789abcdef", dirty=True),
    "machine": Machine("Linux", "a CPU", 4, 8, 64 << 30, [Gpu("Tesla P40", 22 << 30)] * 8),
}
PAGE = "before\n<!-- from records: amoebanet-speed -->\nold\n<!-- end -->\nafter\n"


def record(*results: Result, **run: Any) -> Record:
    return made_record(*results, **{**CUDA_RUN, **run})


def observed(
    name: str, scale: str, steps: Sequence[float] = (100.0, 50.0), **values: Any
) -> Record:
    """Make a record with the same steps for every row, and with utilization and memory."""
    values = {
        "utilization": lambda row: [1.0] * row.devices,
        "bubble": 0.5,
        "peak_allocated": lambda row: [GiB] * row.devices,
        **values,
    }
    return record(*ran(name, scale, lambda row: steps, **values))


def memory(scale: str, device: str, peak: Callable[[int], list[int]], **values: Any) -> Record:
    """Make a record of counted models and of peaks; `peak` is a function of the number of devices."""
    exact: dict[str, Any] = {"parameters": 1_844_858_344, "model_bytes": 12 * 1_844_858_344}
    peaks = {**exact, "peak_allocated": lambda row: peak(row.devices), **values}
    counted = ran("amoebanet-memory", "paper", lambda row: [], "meta", **exact)
    return record(*counted, *ran("amoebanet-memory", scale, lambda row: [], device, **peaks))


def gpipe_is_faster(row: Row) -> Sequence[float] | str:
    speed = {"naive": 16.0, "checkpoint-only": 12.8, "GPipe": 32.0}.get(row.configuration, 20.0)
    return "needs devices" if row.partitions == 8 else [speed, speed / 2, speed / 4]


def emulated_faster_still(row: Row) -> Sequence[float]:
    """Return 12 n samples/s for GPipe of n partitions, 16 for naive, 10 n for rows like the published ones."""
    own = {"naive": 16.0, "checkpoint-only": 12.8, "GPipe": 12.0 * row.devices}
    speed = own.get(row.configuration, (10.0 if row.published else 5.0) * row.devices)
    return [speed, speed / 2, speed / 4]


def both(name: str, scale: str, **options: Any) -> list[Result]:
    """Make an emulated result of every row, and a measured one if there are enough devices."""
    measured = ran(name, scale, lambda row: None if row.partitions == 8 else gpipe_is_faster(row))
    return [*measured, *ran(name, scale, emulated_faster_still, emulated=True, **options)]


MEASURED = ran("amoebanet-speed", "paper", gpipe_is_faster)
SPEED = record(*MEASURED)
EMULATED = record(*both("amoebanet-speed", "paper"), device="cpu", threads_per_device=1, load=None)
LIVE = memory("small", "cpu", lambda n: [(100 + j) * MiB for j in range(n)], model_bytes=50 * MiB)
CUDA = memory("paper", "cuda", lambda n: [20 * GiB] * n, peak_reserved=[21 * GiB])


def busy(made: Record) -> Record:
    """Return the record as if others had had too much of the machine."""
    return replace(
        made, results=[replace(x, samples={**x.samples, "others": [0.2]}) for x in made.results]
    )


UNKNOWN = observed("unet-speed", "paper", utilization=None, utilization_problem="no pynvml")


def lacking(status: str) -> Record:
    """Make a record of speed and memory in which the rows of four devices have this status."""
    slow = ran("amoebanet-speed", "paper", lambda row: status if row.partitions == 4 else [1.0])
    small = [each for each in LIVE.results if each.scale == "small"]
    return record(
        *slow,
        *(
            replace(each, status=status, values={}) if each.row == "pipeline-4" else each
            for each in small
        ),
    )


def changed(row: str, emulated: bool = True, **changes: Any) -> Record:
    """Return the emulated record with one of its rows changed."""
    here = [
        replace(x, **changes) if (x.row, x.emulated) == (row, emulated) else x
        for x in EMULATED.results
    ]
    return replace(EMULATED, results=here)


def trained(
    scale: str, given: Mapping[str, Sequence[float]], epochs: int = 90, **ended: Any
) -> Record:
    """Make a record of trainings: errors of each seed after `epochs` (default: all). Other rows lack devices."""
    results = []
    for each in ran(
        "resnet101-accuracy", scale, lambda row: [] if row.name in given else "needs devices"
    ):
        last, count = given.get(each.row, []), min(epochs, each.config["epochs"])
        samples = {
            "epoch": [k + 1.0 for _ in last for k in range(count)],
            "epoch_time": [2.0] * count * len(last),
            "top1_error": [error for end in last for error in [90.0] * (count - 1) + [end]],
        }
        more = ended if each.row in given else {}
        results.append(
            replace(
                each, samples=samples if last else {}, values={"samples_per_epoch": 1000}, **more
            )
        )
    return record(*results)


def by(
    engine: Engine, speeds: Mapping[str, list[float] | str], emulated: bool = False
) -> list[Result]:
    """Make results of rows with an engine."""
    rows = ran("amoebanet-speed", "small", lambda row: speeds.get(row.name), emulated=emulated)
    return [replace(each, engine=engine) for each in rows]


THREADS = by("threads", {"naive n2": [1.0], "GPipe n2m4": [1.0, 2.0, 1.0]})
ENGINES = record(
    *THREADS,
    *by("threads", {"GPipe n2m4": [8.0]}, emulated=True),
    *by(
        "ranks",
        {"GPipe n2m4": [2.0, 1.0, 4.0], "naive n2": "not run", "GPipe n8m4": "needs devices"},
    ),
    *by("Schedule1F1B", {"GPipe n2m4": "failed", "naive n2": "not run"}),
)
TWO_THREADS = replace(RUN, threads_per_device=2)
TOO_LONG = "not measured: a step would take about 9 min"
NO_ROOM = "out of memory: its 4 partition(s) take 99 GiB"
FEW_DEVICES = [each for each in EMULATED.results if "n8" not in each.row]
NO_LOAD = "NOT in the minute before the start"
NAMES = [
    (name, scale)
    for name in ("amoebanet-speed", "unet-speed", "unet-ablation", "resnet101-speed")
    for scale in ("paper", "small")
]


@pytest.mark.parametrize(
    ("made", "said"),
    [
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
                "scale paper: AmoebaNet-D (18, 256), input 3 x 224 x 224; batch size 64; 3 steps per row",
                "over naive: of the same n (checkpoint-only: over naive n=2), taken round by round",
                "# Title",
                "on 8 CUDA devices",
                "a CPU, 4 cores, 64 GiB of memory, Tesla P40 (22 GiB)",
                "torch 2.11.0; git revision 0123456789ab with changes",
                "seed 7; load at start 0.50 0.25 1.00",
            ],
        ),
        # emulated: samples/s, published, over the base; published; measured: over the base; samples/s of both
        (
            EMULATED,
            [
                "| samples/s emulated |",
                "NOT samples/s (quartiles)",
                "NOT their samples/s are not to be compared",
                "| n4m4 | 360 | except_last | 20.0 | 44.5 | 2.00 | 1.67 | 1.00 | 2.00 |",
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
        (memory("small", "cpu", lambda n: []), ["| pipeline-1 | (18, 32) | measured |"]),
        *(
            (
                lacking(status),
                [
                    f"| GPipe | 4 | 4 | {cell} | |",
                    f"| pipeline-4 | (36, 40) | {cell} | | | |",
                    *notes,
                ],
            )
            for status, cell, notes in (
                ("out of memory", "out of memory", []),
                (
                    "failed",
                    "failed",
                    ["failed: naive n4, GPipe n4m4, GPipe n4m32: needs", "failed: pipeline-4: "],
                ),
                ("needs devices", "needs 4 devices", ["not run for want of devices"]),
            )
        ),
        *(
            (record(*MEASURED, device=device, load=load), [NO_LOAD])
            for device, load in (("cpu", [0.9, 9, 9]), ("cpu", None), ("cuda", [9, 9, 9]))
        ),
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
            replace(
                EMULATED,
                results=[*FEW_DEVICES, *(each for each in MEASURED if each.row == "naive n8")],
            ),
            ["1 row not run for want of devices"],
        ),
        (
            trained("paper", {"dataparallel-256": [22.0], "pipeline-256": [22.5]}),
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
        *(
            (
                trained(
                    "small",
                    {"plain": errors, "GPipe n2m2": errors},
                    2,
                    status=status,
                    reason="no luck",
                ),
                [
                    f"| plain | {cell} |",
                    f"| GPipe n2m2 | {cell} |",
                    "| GPipe n2m4 | needs 2 devices |",
                    note,
                ],
            )
            for status, errors, cell, note in (
                ("measured", [3.0], "epoch 2 of 6", "NOT no luck"),
                ("failed", [3.0], "failed", "failed: plain, GPipe n2m2: no luck"),
            )
        ),
        (
            ENGINES,
            [
                "| row | threads | ranks | over threads | Schedule 1F1B |",
                "| naive n2 | 1.00 | - | | - |",
                "| GPipe n2m4 | 1.00 | 2.00 | 2.00 | failed |",
                "| GPipe | 2 | 4 | 8.00 |",
                "ranks, Schedule1F1B: needs 2 devices (naive n2, GPipe n2m4)",
                "1 row not run for want of devices",
            ],
        ),
        (
            record(*by("ranks", {"GPipe n2m4": [2.0]})),
            ["| row | ranks |", "| GPipe n2m4 | 2.00 |", "NOT over threads"],
        ),
        (record(*THREADS), ["NOT of each engine"]),
        # the widest numbers, and no words
        *((observed(*each), []) for each in NAMES),
        *(
            (
                busy(record(*both(*each, utilization=lambda row: [1.0] * row.devices, bubble=0.5))),
                [],
            )
            for each in NAMES
        ),
        (record(*ran("amoebanet-speed", "paper", lambda row: [132.413, 199.9, 100.1])), []),
        (
            memory(
                "paper", "cuda", lambda n: [int(139.9 * GiB)] * n, peak_reserved=[139 * GiB] * 8
            ),
            [],
        ),
        (memory("small", "cpu", lambda n: [9999 * MiB] * n), []),
    ],
)
def test_what_a_page_says(made: Record, said: list[str]) -> None:
    """In Markdown, without repeated spaces; on a terminal each table fits."""
    page = " ".join(document(made).split())
    assert [
        words for words in said if (words.removeprefix("NOT ") in page) == words.startswith("NOT ")
    ] == []
    assert document(made).count("\n## ") == len(tables(made))
    texts = [table.text() for table in tables(made)]
    assert all(text.isascii() and max(map(len, text.splitlines())) <= WIDTH for text in texts)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (number, 0.0, "0"),
        (number, 2.5e-5, "2.50e-05"),
        (number, 0.0042, "0.00420"),
        (number, 999.7, "1,000"),
        (number, Reading([1.0, 3.0, -0.5]), "1.00"),
        (ratio, 0.0042, "0.00420"),
        (ratio, 0.104, "0.10"),
        (reading_text, Reading(3 * 2**20, "bytes"), "3 MiB"),
        (reading_text, Reading(1024.0, "MiB"), "1.00 GiB"),
        (with_quartiles, Reading([0.5]), "0.500"),
        (span, [64, 8, 9], "8 to 64"),
    ],
)
def test_how_numbers_are_written(
    write: Callable[[object], object], value: object, text: object
) -> None:
    assert write(value) == text


def test_what_is_committed_is_as_its_records_say() -> None:
    files = render(ROOT)
    assert stale(files) == [] and {path.parent.name for path in files} >= {
        "measured",
        "predicted",
        "docs",
    }


def run_of(name: str, started: str, rows: int = 2) -> Record:
    results = ran("amoebanet-speed", "small", lambda row: [8.0])[:rows]
    return replace(made_record(*results, cpu=name, started=started), name=name)


RUNS = [run_of("new", "2026-02"), run_of("few", "2026-05", rows=1)]


def test_a_block_shows_the_newest_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.setattr("reproduce.cli.records.ROOT", tmp_path)
    page, measured = tmp_path / "README.md", tmp_path / "results" / "measured"
    page.write_text(PAGE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("no block\n")
    measured.mkdir(parents=True)
    assert "Nothing measured is committed yet." in render(tmp_path)[page]
    for each in RUNS:
        save(each, measured / f"{each.name}.json")
    names = [f"results/measured/{name}.md" for name in sorted(each.name for each in RUNS)] + [
        "README.md"
    ]
    assert command("render", "--check", code=1)[1].startswith(
        f"reproduce: stale: {', '.join(names)}; run"
    )
    assert command("render")[0].splitlines() == names
    assert command("render", "--check")[0] == "3 files are as their records say\n"
    text = page.read_text()
    assert text.startswith("before\n<!-- from records: amoebanet-speed -->\n### AmoebaNet-D")
    assert text.endswith("<!-- end -->\nafter\n") and "old\n" not in text
    assert "machine: new, 2 cores" in text and "(results/measured/new.md)" in text
    for each in RUNS:
        busy = [replace(x, samples={**x.samples, "others": [0.2]}) for x in each.results]
        save(replace(each, results=busy), measured / f"{each.name}.json")
    page.write_text(PAGE.replace("amoebanet-speed", "amoebanet-speed/short"))
    assert render(tmp_path)[page].count(f"\n- {DISTURBED}") == 1, "its only note"
    page.write_text(PAGE.replace("amoebanet-speed", "x/y"))
    assert (
        "README.md: a block is from 'x/y'; name one of amoebanet-speed, "
        in command("render", code=2)[1]
    )
