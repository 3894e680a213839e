"""The gate: nothing in a training step may come to be more, or less, than the committed file says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import benchmarks.counts
from benchmarks.counted_step import CONFIGURATIONS, Configuration, Counted, Counts, count
from benchmarks.counts import ADVICE, FILE, differences, main, read, tables, write

HERE = Configuration("linear", 2, 4, "never", "workers")
OTHER = Configuration("linear", 2, 4, "never", "graph")
COUNTS = Counts(
    operators=12, nodes=8, kept=5, kept_bytes=512, alive=None, alive_bytes=None, threads=1, threads_left=0, waits=4,
    reads=0,
)  # fmt: skip


def counted(added: dict[str, int] | None = None, **changes: Any) -> dict[Configuration, Counted]:
    return {HERE: Counted(COUNTS._replace(**changes), Counter(added or {}))}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of its own for the command, which counts one configuration that needs no time."""
    path = tmp_path / "counts.json"
    monkeypatch.setattr(benchmarks.counts, "FILE", path)
    monkeypatch.setattr(benchmarks.counts, "CONFIGURATIONS", [HERE])
    monkeypatch.setattr(benchmarks.counts, "count", lambda configuration: counted()[configuration])
    return path


def test_the_gate() -> None:
    lines = differences(read(FILE), {configuration: count(configuration) for configuration in CONFIGURATIONS})
    assert not lines, "\n".join(["", *lines, ADVICE])


# What is counted now; what is said of it.
ROW = "linear n2m4 never workers"
DIFFERENCES: list[tuple[dict[Configuration, Counted], list[str]]] = [
    (counted(), []),
    (counted(nodes=9), [f"{ROW}: nodes grew from 8 to 9, 1.12 per task"]),
    (counted(nodes=7), [f"{ROW}: nodes fell from 8 to 7, 0.88 per task"]),
    (
        counted({"aten.detach.default": 16, "aten.empty.default": 0, "aten.add.Tensor": -2}, operators=14),
        [f"{ROW}: operators grew from 12 to 14, 1.75 per task; in all -2 aten.add.Tensor, +16 aten.detach.default"],
    ),
    (
        counted(kept_bytes=513, threads=2),
        [f"{ROW}: kept bytes grew from 512 to 513", f"{ROW}: threads grew from 1 to 2"],
    ),
    (counted(alive=9), [f"{ROW}: alive changed from not counted to 9"]),
    (
        {OTHER: counted()[HERE]},
        ["linear n2m4 never graph: counted, but not in counts.json", f"{ROW}: in counts.json, but no longer counted"],
    ),
]


@pytest.mark.parametrize(("now", "lines"), DIFFERENCES)
def test_differences(now: dict[Configuration, Counted], lines: list[str], file: Path) -> None:
    write(file, counted())
    assert differences(read(file), now) == lines


def test_tables_fit_80_columns() -> None:
    many = {configuration: counted()[HERE] for configuration in CONFIGURATIONS}
    lines = tables(many).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert {configuration.model for configuration in CONFIGURATIONS} <= set(lines)
    row = next(line for line in lines if line.startswith("n2m4 never workers"))
    assert row.split()[3:] == ["1.50", "1.00", "0.50", "0.00", "5", "1"]


def test_update_then_compare(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["--update"])
    assert len(file.read_text().splitlines()) == 3  # a line for each configuration, between braces
    main([])
    assert "n2m4 never workers" in capsys.readouterr().out

    monkeypatch.setattr(benchmarks.counts, "count", lambda configuration: counted(waits=5)[configuration])
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == (
        "\nlinear n2m4 never workers: waits grew from 4 to 5, 0.62 per task\n"
        "If this is meant, run python -m benchmarks.counts --update, and commit benchmarks/counts.json."
    )
    main(["--update"])
    main([])


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"linear": {"nodes": "8"}}'])
def test_a_broken_file_is_refused_in_one_line(content: str | None, file: Path) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main([])
    line = str(ended.value.code)
    assert line.startswith(f"counts: {file}") and "\n" not in line
    assert line.endswith("; write it by python -m benchmarks.counts --update")


def test_an_interrupt_ends_with_130(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(configuration: Configuration) -> Counted:
        raise KeyboardInterrupt

    main(["--update"])
    before = file.read_text()
    monkeypatch.setattr(benchmarks.counts, "count", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["--update"])
    assert ended.value.code == 130 and file.read_text() == before
