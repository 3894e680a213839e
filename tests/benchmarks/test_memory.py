"""Peak live bytes beside another version's: what is counted, and what counts as too much."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.child import ROOT
from benchmarks.memory_child import WIDTHS, measure
from reproduce.records.record import Record, Result, load

PARAMETERS = 4 * sum((a + 1) * b for a, b in pairwise(WIDTHS))


@pytest.mark.parametrize("engine", memory.ENGINES)
def test_parameters_and_their_gradients_are_counted_in_all_threads(engine: str) -> None:
    assert 2 * PARAMETERS < measure("linear layers", 2, 2, "always", engine) < 4 * PARAMETERS


@pytest.mark.parametrize(
    ("n", "m", "engine", "repeated"),
    [(2, 4, "other", True), (2, 4, "workers", True), (2, 4, "across", False), (1, 4, "auto", False),
     (2, 1, "workers", False)],
)  # fmt: skip
def test_what_depends_on_timing_is_counted_again(n: int, m: int, engine: str, repeated: bool) -> None:
    assert (memory.repetitions(n, m, engine) > 1) == repeated


@pytest.mark.parametrize(
    ("engine", "other", "ours", "too_much"),
    [
        ("graph", [1000.0], [1010.0], False),  # as much as is allowed
        ("graph", [1000.0], [1011.0], True),
        ("across", [1000.0], [1011.0], True),
        ("across", [900.0, 1000.0, 2000.0], [1010.0], False),  # of the other version's median
        ("workers", [1000.0], [2000.0], False),  # reported, not judged
    ],
)
def test_what_has_no_noise_is_judged(engine: str, other: list[float], ours: list[float], too_much: bool) -> None:
    peaks = {"other": other, engine: ours}
    results = [Result("a case", way, "measured", samples={"peak": peak}) for way, peak in peaks.items()]
    lines = memory.too_much(Record("memory", "", "measured", {}, results))
    assert [line.partition(":")[0] for line in lines] == ([f"a case, {engine}"] if too_much else [])


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside itself, where nothing overlaps: exactly as much; and an exit code where that is above what is allowed."""
    monkeypatch.setattr(memory, "CASES", [("linear layers", 1, 2, "always")])
    command = ["--against", str(ROOT), "--json", str(tmp_path / "memory.json")]
    memory.main(command)
    assert capsys.readouterr().out.count("1.000 to 1.000") == len(memory.ENGINES)
    peaks = {result.row: result.samples["peak"] for result in load(tmp_path / "memory.json").results}
    assert list(peaks) == ["other", *memory.ENGINES] and len({peak for (peak,) in peaks.values()}) == 1
    monkeypatch.setattr(memory, "ALLOWED", 0.99)
    with pytest.raises(SystemExit, match=r"linear layers, n=1 m=2 always, graph: 1.0000; .*, across: 1.0000"):
        memory.main(command)
