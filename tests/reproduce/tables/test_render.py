"""Tests of how numbers are written, and of the command `render`, which writes tables into pages.

A generated block of a page must show the tables of the newest finished run. The blocks in committed
pages must be those that `render` makes from the committed records.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.machine.description import ROOT, Gpu, Machine
from reproduce.numbers.metrics import DISTURBED, Reading
from reproduce.records.record import Record, load, save
from reproduce.tables.layout import number, ratio, reading_text, span, with_quartiles
from reproduce.tables.measured import measured_rows
from reproduce.tables.render import render, stale

from ..made import ran, record

PAGE = "before\n<!-- from records: amoebanet-speed -->\nold\n<!-- end -->\nafter\n"


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
    assert stale(files) == []
    folders = {path.parent.name for path in files}
    assert folders >= {"measured", "predicted", "docs"}


def test_a_short_block_says_over_what_a_ratio_is() -> None:
    """Check that short tables keep the notes that say what each ratio is divided by.

    The command `render` writes these tables into the README.
    """
    text = render(ROOT)[ROOT / "README.md"]
    tables = text.partition("<!-- from records: amoebanet-speed/short -->")[2]
    tables = tables.partition("<!-- end -->")[0]
    assert tables.count("| emul./meas. |") == 2
    assert (
        tables.count("emul./meas. is the emulated divided by the measured samples/s, as the median")
        == 2
    )
    assert tables.count("\n- Speed-ups are over n2m1. ") == 1
    assert (
        tables.count("\n- Speed-ups are over the naive row of the same n (checkpoint-only: ") == 1
    )
    assert "compare the shape" not in tables


def test_a_block_of_predictions_has_a_column_for_each_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a table of predictions has a column for the runs on each kind of GPU.

    The command `render` writes this table into a page. The table's other columns are published
    numbers and predictions.
    """
    page = tmp_path / "README.md"
    page.write_text(PAGE.replace("amoebanet-speed", "amoebanet-speed/predicted"))
    assert "Nothing measured is committed yet." in render(tmp_path)[page]
    predicted = tmp_path / "results/predicted/amoebanet-speed-p40x8.json"
    predicted.parent.mkdir(parents=True)
    save(load(ROOT / "results/predicted/amoebanet-speed-p40x8.json"), predicted)
    results = ran("amoebanet-speed", "paper", lambda row: [100.0], "cuda", emulated=True)
    measured = tmp_path / "results/measured"
    measured.mkdir()
    for gpu in ("NVIDIA H200", "NVIDIA B200"):
        machine = Machine("Linux", "a CPU", 2, 2, 8 << 30, [Gpu(gpu, 1 << 37)])
        run = record(*results, device="cuda", devices=1, machine=machine)
        save(replace(run, name=gpu), measured / f"{gpu}.json")
    there = partial(measured_rows, folder=measured)
    monkeypatch.setattr("reproduce.tables.all.measured_rows", there)

    heading, *_ = [line for line in render(tmp_path)[page].splitlines() if "published" in line]

    assert "predicted" in heading
    assert "emulated 1 x NVIDIA H200" in heading
    assert "emulated 1 x NVIDIA B200" in heading


def run_of(name: str, started: str, rows: int = 2) -> Record:
    results = ran("amoebanet-speed", "small", lambda row: [8.0])
    times = {"started": f"{started}-01T00:00:00Z", "ended": f"{started}-01T00:07:40Z"}
    made = record(*results[:rows], cpu=name, **times)
    return replace(made, name=name)


# The newest run does not have all rows.
RUNS = [run_of("new", "2026-02"), run_of("few", "2026-05", rows=1)]


def test_a_block_shows_the_newest_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.setattr("reproduce.cli.records.ROOT", tmp_path)
    page, docs, measured = tmp_path / "README.md", tmp_path / "docs", tmp_path / "results/measured"
    docs.mkdir()
    measured.mkdir(parents=True)
    page.write_text(PAGE)
    (docs / "page.md").write_text("no block\n")
    assert "Nothing measured is committed yet." in render(tmp_path)[page]

    for run in RUNS:
        save(run, measured / f"{run.name}.json")
    _, err = command("render", "--check", code=1)
    written, _ = command("render")
    checked, _ = command("render", "--check")

    names = ["results/measured/few.md", "results/measured/new.md", "README.md"]
    assert err.startswith(f"reproduce: stale: {', '.join(names)}; run")
    assert written.splitlines() == names
    assert checked == "3 files are as their records say\n"
    text = page.read_text()
    assert text.startswith("before\n<!-- from records: amoebanet-speed -->\n### AmoebaNet-D")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old\n" not in text
    assert "These rows were run on 2026-02-01 in 8 minutes with torch" in text
    assert "machine: new, 2 cores" in text
    assert "(results/measured/new.md)" in text

    for run in RUNS:
        assert run.run is not None
        continued = replace(run.run, command=[*run.run.command, "--resume"])
        save(replace(run, run=continued), measured / f"{run.name}.json")
    text = render(tmp_path)[page]
    assert "These rows were run on 2026-02-01 with torch" in text, "the pause is no part of it"

    for run in RUNS:
        busy = []
        for result in run.results:
            samples = {**result.samples, "others": [0.2]}
            busy.append(replace(result, samples=samples))
        save(replace(run, results=busy), measured / f"{run.name}.json")
    page.write_text(PAGE.replace("amoebanet-speed", "amoebanet-speed/short"))
    short = render(tmp_path)[page]
    assert short.count(f"\n- {DISTURBED}") == 1
    assert short.count("\n- Speed-ups are over ") == 1
    assert short.count("\n- ") == 2, "a short block has no other notes"

    page.write_text(PAGE.replace("amoebanet-speed", "x/y"))
    _, err = command("render", code=2)
    assert "README.md: a generated block has the unknown name 'x/y'; use one of amoebanet" in err
