"""Rendering: what is committed is what the records say, and a block is replaced by the newest finished run's tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from reproduce.cli.main import main
from reproduce.records.record import Record, save
from reproduce.tables.render import render

from ..made import ran
from ..made import record as made

PAGE = "before\n<!-- from records: amoebanet-speed -->\nold\n<!-- end -->\nafter\n"


def record(name: str, started: str, state: str = "finished", status: str = "measured", rows: int = 2) -> Record:
    results = [replace(each, status=status) for each in ran("amoebanet-speed", "small", lambda row: [8.0])[:rows]]
    return replace(made(*results, cpu=name, started=started, state=state), name=name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("no block\n")
    (tmp_path / "results" / "measured").mkdir(parents=True)
    return tmp_path


def commit(root: Path, *records: Record) -> None:
    for each in records:
        save(each, root / "results" / "measured" / f"{each.name}.json")


def test_the_newest_finished_run_of_most_rows_is_shown(root: Path) -> None:
    assert "Nothing measured is committed yet." in render(root)[root / "README.md"]
    commit(root, record("new", "2026-02"), record("old", "2026-01"), record("broken off", "2026-03", "interrupted"),
           record("empty", "2026-04", status="failed"), record("few", "2026-05", rows=1))  # fmt: skip
    files = render(root)
    page = files[root / "README.md"]
    assert page.startswith("before\n<!-- from records: amoebanet-speed -->\n### AmoebaNet-D")
    assert page.endswith("<!-- end -->\nafter\n") and "old\n" not in page
    assert "machine: new, 2 cores" in page and "(results/measured/new.md)" in page
    pages = {f"{name}.md" for name in ("README", "new", "old", "broken off", "empty", "few")}
    assert {path.name for path in files} == pages


def test_the_command(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commit(root, record("new", "2026-02"))
    monkeypatch.setattr("reproduce.cli.records.ROOT", root)
    assert main(["render", "--check"]) == 1
    assert capsys.readouterr().err.startswith("reproduce: stale: results/measured/new.md, README.md; run")
    assert main(["render"]) == 0
    assert capsys.readouterr().out == "results/measured/new.md\nREADME.md\n"
    assert main(["render", "--check"]) == 0, "rendering again changes nothing"
    assert capsys.readouterr().out == "2 files are as their records say\n"
    (root / "README.md").write_text(PAGE.replace("amoebanet-speed", "x/y"))
    assert main(["render"]) == 1
    assert "README.md: a block is from 'x/y'; name one of amoebanet-speed, " in capsys.readouterr().err
