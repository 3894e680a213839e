"""Tables: what stands in them is worked out from records, and they fit 80 columns whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from reproduce.cli.listing import listing
from reproduce.experiments import AS_PUBLISHED, EXPERIMENTS, Row
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.devices import Devices
from reproduce.machine.git import Git
from reproduce.records.published import published
from reproduce.records.record import Record, Result, Run
from reproduce.run.training import size_names
from reproduce.tables.all import document, tables
from reproduce.tables.layout import WIDTH

SPEED, MEMORY = EXPERIMENTS["amoebanet-speed"], EXPERIMENTS["amoebanet-memory"]
RUN = Run(
    state="finished",
    command=["python", "-m", "reproduce", "run", "amoebanet-speed"],
    seed=7,
    started="2020-04-21T10:02:05Z",
    ended="2020-04-21T10:12:05Z",
    device="cuda",
    devices=8,
    threads_per_device=None,
    machine=Machine("Linux", "a CPU", 4, 8, 64 << 30, [Gpu("Tesla P40", 22 << 30)] * 8),
    versions={"torch": "2.11.0", "torchvision": None},
    git=Git("0123456789abcdef", dirty=True),
    load=[0.5, 0.25, 1.0],
)


def result(experiment: str, row: Row, scale: str = "small", device: str = "cpu", **values: object) -> Result:
    config = row.config(size_names(row.model))
    table = EXPERIMENTS[experiment].table
    base = Result(
        experiment,
        row.name,
        "measured",
        scale,
        device,
        config,
        row.over,
        row.over_published,
        f"{table}/{row.published}",
    )
    return replace(base, **values)  # type: ignore[arg-type]


def record(*results: Result) -> Record:
    return Record("name", "Title", "measured", {}, list(results), scale="small", run=RUN)


def speed_record(scale: str, seconds: Callable[[Row], Sequence[float] | str]) -> Record:
    """Make a record of steps that take so many seconds; a text is the status of a row without any."""
    results = []
    for row in SPEED.scale(scale).rows:
        taken = seconds(row)
        if isinstance(taken, str):
            results.append(result(SPEED.name, row, scale, status=taken, reason=f"needs {row.partitions} devices"))
        else:
            series = {"step_time": list(taken), "round": [float(i) for i in range(len(taken))]}
            results.append(result(SPEED.name, row, scale, samples=series))
    return record(*results)


def cells(found: Record, title: str) -> dict[tuple[str, ...], list[str]]:
    """Return the rows of the table with that word in its title, by their first three cells."""
    (table,) = [table for table in tables(found) if title in table.title]
    return {tuple(row[:3]): list(row[3:]) for row in table.rows}


def gpipe_is_faster(row: Row) -> Sequence[float] | str:
    if row.partitions == 8:
        return "needs devices"
    seconds = {"naive": 4.0, "checkpoint-only": 5.0, "GPipe": 2.0}[row.configuration]
    return [seconds, 2 * seconds, 4 * seconds]


def test_speed_at_equal_batch() -> None:
    rows = cells(speed_record("small", gpipe_is_faster), "equal batch")
    assert len(rows) == 15
    assert rows["naive", "2", "1"] == ["8.00 (6.00-12.0)", "1", "1.25", "1.00"]
    assert rows["GPipe", "2", "4"] == ["16.0 (12.0-24.0)", "2.00 (2.00-2.00)", "2.50", "1.54"]
    assert rows["GPipe", "4", "32"] == ["16.0 (12.0-24.0)", "2.00 (2.00-2.00)", "2.50", "2.70"]
    assert rows["checkpoint-only", "1", "32"] == ["6.40 (4.80-9.60)", "0.80 (0.80-0.80)", "1.00", ""]
    assert rows["GPipe", "8", "32"] == ["needs 8 devices", "", "", "5.31"]


def test_published_speed_ups_are_derived_from_throughputs() -> None:
    rows = cells(speed_record("small", gpipe_is_faster), "equal batch")
    throughput = {row.row: row.values["throughput"] for row in published(SPEED.table).results}
    for n in (2, 4, 8):
        for m in (1, 4, 32):
            assert rows["GPipe", str(n), str(m)][-1] == f"{throughput[f'n{n}m{m}'] / throughput[f'n{n}m1']:.2f}"


def test_speed_says_what_the_numbers_are() -> None:
    text = " ".join(tables(speed_record("small", gpipe_is_faster))[0].text().split())
    for said in (
        "scale small: AmoebaNet-D (6, 32), input 3 x 224 x 224; batch size 64; 3 timed steps per row",
        "over naive: of the same n (checkpoint-only: over naive n=2), taken round by round",
        "its batch size differs from row to row (96 to 1280)",
        "its m=1 rows recompute everything (checkpoint=always)",
        "4 rows not run for want of devices",
    ):
        assert said in text


def test_speed_as_published() -> None:
    found = speed_record("paper", lambda row: [2.0] if row.configuration == AS_PUBLISHED else "needs devices")
    rows = cells(found, "as published")
    assert len(rows) == 9
    assert rows["n2m1", "96", "always"] == ["48.0", "26.7", "1", "1.00"]
    assert rows["n8m32", "1280", "except_last"] == ["640", "132", "6.53", "5.31"]


@pytest.mark.parametrize(
    ("status", "cell"),
    [
        ("out of memory", "out of memory"),
        ("failed", "failed"),
        ("not run", "not run"),
        ("needs devices", "needs 4 devices"),
    ],
)
def test_speed_of_rows_without_steps(status: str, cell: str) -> None:
    found = speed_record("small", lambda row: status if row.partitions == 4 else [1.0])
    assert cells(found, "equal batch")["GPipe", "4", "4"][:2] == [cell, ""]
    note = "failed: naive n4, GPipe n4m1, GPipe n4m4, GPipe n4m32: needs 4 devices"
    assert (note in tables(found)[0].notes) == (status == "failed")


def test_one_row_can_lack_what_it_is_compared_with() -> None:
    found = speed_record("small", lambda row: "out of memory" if row.configuration == "naive" else [1.0])
    assert cells(found, "equal batch")["GPipe", "2", "4"] == ["64.0", "1.00", "1.54"], "a column of nothing goes"


@pytest.mark.parametrize(
    ("device", "load", "warned"),
    [("cpu", [1.5, 0, 0], True), ("cpu", [0.9, 9, 9], False), ("cpu", None, False), ("cuda", [9, 9, 9], False)],
)
def test_a_busy_machine_is_told(device: str, load: list[float] | None, warned: bool) -> None:
    found = speed_record("small", gpipe_is_faster)
    found = replace(found, run=replace(RUN, device=device, load=load))
    note = "the machine was busy: load 1.50 on 4 cores before the start"
    assert (note in tables(found)[0].notes) == warned
    assert warned or not any("busy" in note for note in tables(found)[0].notes)


def memory_record(scale: str, device: str, peak: Callable[[int], list[int]], **more: object) -> Record:
    exact = {"parameters": 1_844_858_344, "model_bytes": 12 * 1_844_858_344}
    counted = [result(MEMORY.name, row, "paper", "meta", values=exact) for row in MEMORY.scale("paper").rows]
    run = [
        result(MEMORY.name, row, scale, device, values={**exact, "peak_allocated": peak(row.devices), **more})
        for row in MEMORY.scale(scale).rows
    ]
    return record(*counted, *run)


def test_memory_of_the_published_models() -> None:
    rows = cells(memory_record("small", "cpu", lambda n: [2**30] * n), "published models")
    assert rows["baseline", "(18, 208)", "1,844,858,344"] == ["81.5 M", "20.62", "0.91", "out of memory"]
    assert rows["pipeline-8", "(72, 512)", "1,844,858,344"] == ["1,840.0 M", "20.62", "20.62", "10.83"]


def test_memory_measured() -> None:
    found = memory_record("small", "cpu", lambda n: [(100 + j) * 2**20 for j in range(n)])
    found = replace(found, results=[replace(r, values={**r.values, "model_bytes": 50 * 2**20}) for r in found.results])
    rows = cells(found, "live bytes")
    assert rows["pipeline-1", "(18, 64)", "100"] == ["100", "50", "50"]
    assert rows["pipeline-8", "(72, 80)", "100  101  102  103\n104  105  106  107"] == ["828", "50", "778"]


def test_memory_on_cuda_shows_both_kinds() -> None:
    found = memory_record("paper", "cuda", lambda n: [20 * 2**30] * n, peak_reserved=[21 * 2**30])
    titles = [table.title for table in tables(found)]
    assert [title.rpartition(", ")[2] for title in titles[1:]] == ["allocated", "as published"]
    assert cells(found, "peak, allocated")["pipeline-2", "(18, 544)", "20.00  20.00"] == ["40.00", "20.62", "19.38"]
    assert cells(found, "peak, reserved")["baseline", "(18, 208)", "21.00"] == ["21.00", "20.62", "0.38"]


@pytest.mark.parametrize("status", ["out of memory", "failed", "needs devices", "not run"])
def test_memory_of_rows_without_peak(status: str) -> None:
    found = memory_record("small", "cpu", lambda n: [2**30] * n)
    bad = [replace(r, status=status, reason="why", values={}) if r.row == "pipeline-4" and r.scale == "small" else r
           for r in found.results]  # fmt: skip
    cell = "why" if status == "needs devices" else status
    found = replace(found, results=bad)  # type: ignore[arg-type]
    assert cells(found, "live bytes")["pipeline-4", "(36, 80)", cell] == ["", "", ""]


def test_memory_of_nothing_but_failures() -> None:
    found = memory_record("small", "cpu", lambda n: [])
    rows = cells(found, "measured peak, nothing")
    assert len(rows) == 5 and all(cells == ["", "", ""] for cells in rows.values())


def values_of(row: Row) -> dict[str, object]:
    return {"utilization": [1.0] * row.devices, "bubble": 0.5, "peak_allocated": [2**30] * row.devices}


def other_record(name: str, scale: str, **values: object) -> Record:
    """Make a record of two steps of every row of an experiment, watched, with memory."""
    samples = {"step_time": [1.0, 2.0], "round": [0.0, 1.0]}
    rows = EXPERIMENTS[name].scale(scale).rows
    found = [result(name, row, scale, samples=samples, values={**values_of(row), **values}) for row in rows]
    return record(*found)


@pytest.mark.parametrize(
    ("name", "scale", "title", "row", "expected"),
    [
        ("unet-speed", "paper", "as published", ("pipeline-8", "640", "40"),
         ["480 (400-560)", "88.5", "16.0 (16.0-16.0)", "3.11"]),
        ("unet-speed", "small", "like the published", ("pipeline-2", "128", "32"),
         ["96.0 (80.0-112)", "12.8 (12.8-12.8)", "1.25"]),
        ("resnet101-speed", "paper", "as published", ("pipeline-4", "5632", "256"),
         ["4224 (3520-4928)", "266", "47.7 (47.7-47.7)", "2.77"]),
        ("unet-speed", "small", "equal micro-batch", ("GPipe", "2", "32"),
         ["24.0 (20.0-28.0)", "32.0 (32.0-32.0)"]),
        ("resnet101-speed", "small", "how busy", ("pipeline-2", "100%  100%", "100%"), ["50%"]),
        ("unet-ablation", "paper", "as published", ("dep-x-x", "x--", "96.0 (80.0-112)"),
         ["1.00", "1.35", "100%", "59%", "4.00", "19.1"]),
        ("unet-ablation", "small", "ours, on fewer devices", ("dep-str-ptl n2", "xxx", "96.0 (80.0-112)"),
         ["1.00", "100%", "2.00"]),
    ],
)  # fmt: skip
def test_rows_of_every_experiment(name: str, scale: str, title: str, row: tuple[str, ...], expected: list[str]) -> None:
    assert cells(other_record(name, scale), title)[row] == expected


def test_notes_say_what_is_ours_and_what_a_switch_cannot_change() -> None:
    notes = {table.title: " ".join(table.notes) for table in tables(other_record("unet-ablation", "small"))}
    ours = next(text for title, text in notes.items() if "ours" in title)
    assert "it matters to engine='graph' alone" in ours and "with n=2 no skip has a partition between its ends" in ours
    speed = {table.title: " ".join(table.notes) for table in tables(other_record("unet-speed", "small"))}
    assert [("nobody has published these rows" in text) for text in speed.values()] == [False, True, True, False]
    assert "micro-batch size 1, so the batch size is 1 x m" in " ".join(speed.values())


def test_why_there_is_no_utilization_is_told() -> None:
    found = other_record("unet-speed", "paper", utilization=None, utilization_problem="no pynvml")
    rows = cells(found, "how busy")
    assert rows["baseline", "-", "-"] == ["50%"]
    assert any("no utilization: no pynvml" in note for table in tables(found) for note in table.notes)


WIDEST = [
    other_record("unet-speed", "paper"),
    other_record("resnet101-speed", "paper"),
    other_record("resnet101-speed", "small"),
    other_record("unet-ablation", "paper"),
    other_record("unet-ablation", "small"),
    speed_record("paper", lambda row: [row.batch_size / 132.413, row.batch_size / 199.9, row.batch_size / 100.1]),
    speed_record("small", lambda row: "failed" if row.partitions == 4 else [1.0, 1.1]),
    memory_record("paper", "cuda", lambda n: [int(139.9 * 2**30)] * n, peak_reserved=[139 * 2**30] * 8),
    memory_record("small", "cpu", lambda n: [9999 * 2**20] * n),
]


@pytest.mark.parametrize("found", WIDEST)
def test_tables_fit_80_columns_and_are_ascii(found: Record) -> None:
    for table in tables(found):
        assert table.text().isascii()
        assert max(map(len, table.text().splitlines())) <= WIDTH


@pytest.mark.parametrize("devices", [Devices("cpu", 2, 1), Devices("cpu", 8, 16)])
def test_the_list_fits_80_columns_and_has_every_row(devices: Devices) -> None:
    lines = listing(devices).splitlines()
    assert max(map(len, lines)) <= WIDTH
    for experiment in EXPERIMENTS.values():
        for scale in experiment.scales:
            for row in scale.rows:
                assert any(line.startswith(f"{row.name} ") for line in lines)


@pytest.mark.parametrize("found", WIDEST)
def test_document_has_circumstances_and_every_table(found: Record) -> None:
    page = document(found)
    for said in (
        "# Title", "scale `small` on 8 CUDA device(s)", "a CPU, 4 core(s), 64 GiB of memory, Tesla P40 (22 GiB)",
        "torch 2.11.0; git revision 0123456789ab with changes", "seed 7; load at start 0.50 0.25 1.00",
        "`python -m reproduce run amoebanet-speed`", "`name.json`",
    ):  # fmt: skip
        assert said in page
    assert page.count("\n## ") == len(tables(found))
