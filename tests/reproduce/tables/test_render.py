"""Rendering: committed pages equal those made from records; a block shows the newest finished run's tables."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.machine.description import ROOT
from reproduce.numbers.metrics import DISTURBED
from reproduce.records.record import Record, save
from reproduce.tables.render import render, stale

from ..made import ran
from ..made import record as made

PAGE = "before\n<!-- from records: amoebanet-speed -->\nold\n<!-- end -->\nafter\n"


def test_what_is_committed_is_as_its_records_say() -> None:
    files = render(ROOT)
    assert stale(files) == [] and {path.parent.name for path in files} >= {"measured", "predicted", "docs"}


def record(name: str, started: str, rows: int = 2) -> Record:
    results = ran("amoebanet-speed", "small", lambda row: [8.0])[:rows]
    return replace(made(*results, cpu=name, started=started), name=name)


RUNS = [record("new", "2026-02"), record("few", "2026-05", rows=1)]


def test_a_block_shows_the_newest_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.setattr("reproduce.cli.records.ROOT", tmp_path)
    page, measured = tmp_path / "README.md", tmp_path / "results" / "measured"
    page.write_text(PAGE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("no block\n")
    measured.mkdir(parents=True)
    assert "Nothing measured is committed yet." in render(tmp_path)[page]
    for each in RUNS:
        save(each, measured / f"{each.name}.json")
    names = [f"results/measured/{name}.md" for name in sorted(each.name for each in RUNS)] + ["README.md"]
    assert command("render", "--check", code=1)[1].startswith(f"reproduce: stale: {', '.join(names)}; run")
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
    assert "README.md: a block is from 'x/y'; name one of amoebanet-speed, " in command("render", code=2)[1]
