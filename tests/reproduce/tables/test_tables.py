"""Tables of experiments: what stands in them is worked out from records, and they fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.experiments import AS_PUBLISHED, EXPERIMENTS, Row
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import Record, Result, Run
from reproduce.tables.all import document, tables
from reproduce.tables.layout import WIDTH

MiB, GiB = 2**20, 2**30
RUN = Run("finished", ["python", "-m", "reproduce", "run"], 7, "2020-04-21T10:02:05Z", "2020-04-21T10:12:05Z",
          "cuda", 8, None, Machine("Linux", "a CPU", 4, 8, 64 << 30, [Gpu("Tesla P40", 22 << 30)] * 8),
          {"torch": "2.11.0", "torchvision": None}, Git("0123456789abcdef", dirty=True), [0.5, 0.25, 1.0])  # fmt: skip
Seconds = Callable[[Row], Sequence[float] | str]


def record(*results: Result, **run: object) -> Record:
    return Record("name", "Title", "measured", {}, list(results), scale="small", run=replace(RUN, **run))


def results(name: str, scale: str, seconds: Seconds, device: str = "cpu", **values: object) -> list[Result]:
    """Make a result of every row, of steps that take so many seconds; a text is the status of a row without any."""
    made = []
    for row in EXPERIMENTS[name].scale(scale).rows:
        given = seconds(row)
        status, steps = (given, []) if isinstance(given, str) else ("measured", list(given))
        own = {k: v(row) if callable(v) else v for k, v in values.items()} if status == "measured" else {}
        made.append(Result(
            name, row.name, status, scale, device, row.config(), row.over, row.over_published,  # type: ignore[arg-type]
            f"{EXPERIMENTS[name].table}/{row.published}", f"needs {row.devices} devices", values=own,
            samples={"step_time": steps, "round": [float(i) for i in range(len(steps))]} if steps else {},
        ))  # fmt: skip
    return made


def observed(name: str, scale: str, **values: Any) -> Record:
    """Make a record of two steps of every row, with utilization and memory."""
    values = {"utilization": lambda row: [1.0] * row.devices, "bubble": 0.5,
              "peak_allocated": lambda row: [GiB] * row.devices, **values}  # fmt: skip
    return record(*results(name, scale, lambda row: [1.0, 2.0], **values))


def memory(scale: str, device: str, peak: Callable[[int], list[int]], **values: object) -> Record:
    """Make a record of peaks, given those for a number of devices, and of what was counted."""
    exact = {"parameters": 1_844_858_344, "model_bytes": 12 * 1_844_858_344}
    peaks = {**exact, "peak_allocated": lambda row: peak(row.devices), **values}
    counted = results("amoebanet-memory", "paper", lambda row: [], "meta", **exact)
    return record(*counted, *results("amoebanet-memory", scale, lambda row: [], device, **peaks))


def rest(made: Record, title: str) -> dict[tuple[str, ...], list[str]]:
    """Return the rows of the table with that in its title: what follows by their first three cells."""
    (table,) = [table for table in tables(made) if title in table.title]
    return {tuple(row[:3]): list(row[3:]) for row in table.rows}


def notes(made: Record) -> str:
    return " ".join(note for table in tables(made) for note in table.notes)


def gpipe_is_faster(row: Row) -> Sequence[float] | str:
    seconds = {"naive": 4.0, "checkpoint-only": 5.0, "GPipe": 2.0}[row.configuration]
    return "needs devices" if row.partitions == 8 else [seconds, 2 * seconds, 4 * seconds]


SPEED = record(*results("amoebanet-speed", "small", gpipe_is_faster))
PUBLISHED = record(*results("amoebanet-speed", "paper",
                            lambda row: [2.0] if row.configuration == AS_PUBLISHED else "needs devices"))  # fmt: skip
LIVE = memory("small", "cpu", lambda n: [(100 + j) * MiB for j in range(n)], model_bytes=50 * MiB)
LARGE = memory("small", "cpu", lambda n: [9999 * MiB] * n)
CUDA = memory("paper", "cuda", lambda n: [20 * GiB] * n, peak_reserved=[21 * GiB])
UNKNOWN = observed("unet-speed", "paper", utilization=None, utilization_problem="no pynvml")
NO_NAIVE = record(*results("amoebanet-speed", "small",
                           lambda row: "out of memory" if row.configuration == "naive" else [1.0]))  # fmt: skip


@pytest.mark.parametrize(
    ("made", "title", "row", "expected"),
    [
        (SPEED, "equal batch", ("naive", "2", "1"), ["8.00 (6.00-12.0)", "1", "1.25", "1.00"]),
        (SPEED, "equal batch", ("GPipe", "2", "4"), ["16.0 (12.0-24.0)", "2.00 (2.00-2.00)", "2.50", "1.54"]),
        (SPEED, "equal batch", ("checkpoint-only", "1", "32"), ["6.40 (4.80-9.60)", "0.80 (0.80-0.80)", "1.00", ""]),
        (SPEED, "equal batch", ("GPipe", "8", "32"), ["needs 8 devices", "", "", "5.31"]),
        (NO_NAIVE, "equal batch", ("GPipe", "2", "4"), ["64.0", "1.00", "1.54"]),  # a column of nothing goes
        (PUBLISHED, "as published", ("n2m1", "96", "always"), ["48.0", "26.7", "1", "1.00"]),
        (PUBLISHED, "as published", ("n8m32", "1280", "except_last"), ["640", "132", "6.53", "5.31"]),
        (observed("unet-speed", "paper"), "as published", ("pipeline-8", "640", "40"),
         ["480 (400-560)", "88.5", "16.0 (16.0-16.0)", "3.11"]),
        (observed("unet-speed", "small"), "like the published", ("pipeline-2", "128", "32"),
         ["96.0 (80.0-112)", "12.8 (12.8-12.8)", "1.25"]),
        (observed("unet-speed", "small"), "equal micro-batch", ("GPipe", "2", "32"),
         ["24.0 (20.0-28.0)", "32.0 (32.0-32.0)"]),
        (observed("resnet101-speed", "small"), "how busy", ("pipeline-2", "100%  100%", "100%"), ["50%"]),
        (UNKNOWN, "how busy", ("baseline", "-", "-"), ["50%"]),
        (observed("unet-ablation", "paper"), "as published", ("dep-x-x", "x--", "96.0 (80.0-112)"),
         ["1.00", "1.35", "100%", "59%", "4.00", "19.1"]),
        (observed("unet-ablation", "small"), "ours, on fewer devices", ("dep-str-ptl n2", "xxx", "96.0 (80.0-112)"),
         ["1.00", "100%", "2.00"]),
        (LIVE, "published models", ("baseline", "(18, 208)", "1,844,858,344"),
         ["81.5 M", "20.62", "0.91", "out of memory"]),
        (LIVE, "published models", ("pipeline-8", "(72, 512)", "1,844,858,344"),
         ["1,840.0 M", "20.62", "20.62", "10.83"]),
        (LIVE, "live bytes", ("pipeline-8", "(72, 80)", "100  101  102  103\n104  105  106  107"),
         ["828", "50", "778"]),
        (CUDA, "peak, allocated", ("pipeline-2", "(18, 544)", "20.00  20.00"), ["40.00", "20.62", "19.38"]),
        (CUDA, "reserved, as published", ("pipeline-1", "(18, 416)", "21.00"), ["21.00", "20.62", "0.38"]),
        (LARGE, "live bytes", ("pipeline-2", "(18, 80)", "9999  9999"), ["19998", "21113", "-1115"]),
        (memory("small", "cpu", lambda n: []), "peak, nothing", ("pipeline-1", "(18, 64)", "measured"), []),
    ],
)  # fmt: skip
def test_rows(made: Record, title: str, row: tuple[str, ...], expected: list[str]) -> None:
    assert rest(made, title)[row] == expected


@pytest.mark.parametrize(
    ("status", "cell", "note"),
    [
        ("out of memory", "out of memory", ""),
        ("not run", "not run", ""),
        ("failed", "failed", "failed: {}: needs 4 devices"),
        ("needs devices", "needs 4 devices", "not run for want of devices"),
    ],
)
def test_rows_without_numbers(status: str, cell: str, note: str) -> None:
    speed = record(*results("amoebanet-speed", "small", lambda row: status if row.partitions == 4 else [1.0]))
    assert rest(speed, "equal batch")["GPipe", "4", "4"][:2] == [cell, ""]
    assert note.format("naive n4, GPipe n4m1, GPipe n4m4, GPipe n4m32") in notes(speed)
    lacking = [replace(each, status=status, values={}) if each.row == "pipeline-4" and each.scale == "small" else each
               for each in LIVE.results]  # fmt: skip
    live = replace(LIVE, results=lacking)
    assert rest(live, "live bytes")["pipeline-4", "(36, 80)", cell] == ["", "", ""]
    assert note.format("pipeline-4") in notes(live)


@pytest.mark.parametrize(
    ("made", "texts"),
    [
        (SPEED, [
            "scale small: AmoebaNet-D (6, 32), input 3 x 224 x 224; batch size 64; 3 timed steps per row",
            "over naive: of the same n (checkpoint-only: over naive n=2), taken round by round",
            "its batch size differs from row to row (96 to 1280)",
            "its m=1 rows recompute everything (checkpoint=always)",
            "4 rows not run for want of devices",
            "nobody has published these rows",
        ]),
        (observed("unet-ablation", "small"), ["it matters to engine='graph' alone", "with n=2 no skip has"]),
        (observed("unet-speed", "small"), ["micro-batch size 1, so the batch size is 1 x m", "with a smaller model"]),
        (UNKNOWN, ["no utilization: no pynvml"]),
    ],
)  # fmt: skip
def test_notes_say_what_the_numbers_are(made: Record, texts: Sequence[str]) -> None:
    assert [text for text in texts if text not in notes(made)] == []


@pytest.mark.parametrize(
    ("run", "warned"),
    [
        ({"device": "cpu", "load": [1.5, 0, 0]}, True),
        ({"device": "cpu", "load": [0.9, 9, 9]}, False),
        ({"device": "cpu", "load": None}, False),
        ({"device": "cuda", "load": [9, 9, 9]}, False),
    ],
)
def test_a_busy_machine_is_noted(run: Mapping[str, object], warned: bool) -> None:
    assert ("the machine was busy: load 1.50 on 4 cores" in notes(record(*SPEED.results, **run))) == warned


WIDEST = {
    **{f"{name}, {scale}": observed(name, scale) for name in ("unet-speed", "unet-ablation", "resnet101-speed")
       for scale in ("paper", "small")},
    "speed, paper": record(*results("amoebanet-speed", "paper",
                                    lambda row: [row.batch_size / speed for speed in (132.413, 199.9, 100.1)])),
    "speed, small": record(*results("amoebanet-speed", "small",
                                    lambda row: "failed" if row.partitions == 4 else [1.0, 1.1])),
    "memory, paper": memory("paper", "cuda", lambda n: [int(139.9 * GiB)] * n, peak_reserved=[139 * GiB] * 8),
    "memory, small": LARGE,
}  # fmt: skip


@pytest.mark.parametrize("made", WIDEST.values(), ids=WIDEST.keys())
def test_pages_have_circumstances_and_every_table_which_fit_80_columns(made: Record) -> None:
    page = document(made)
    for text in (
        "# Title", "scale `small` on 8 CUDA device(s)", "a CPU, 4 core(s), 64 GiB of memory, Tesla P40 (22 GiB)",
        "torch 2.11.0; git revision 0123456789ab with changes", "seed 7; load at start 0.50 0.25 1.00",
        "`python -m reproduce run`", "`name.json`",
    ):  # fmt: skip
        assert text in page
    assert page.count("\n## ") == len(tables(made))
    for table in tables(made):
        assert table.text().isascii() and max(map(len, table.text().splitlines())) <= WIDTH
