"""Peak live bytes beside another version's: what is counted, and what counts as more."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.child import ROOT
from benchmarks.memory_child import WIDTHS, measure

PARAMETERS = 4 * sum((a + 1) * b for a, b in pairwise(WIDTHS))


@pytest.mark.parametrize("engine", memory.ENGINES)
def test_parameters_and_their_gradients_are_counted_in_all_threads(engine: str) -> None:
    assert 2 * PARAMETERS < measure("linear layers", 2, 2, "always", engine) < 4 * PARAMETERS


# n, m, engine: counted more than once?
REPEATED = [
    (2, 4, "other", True),
    (2, 4, "auto", True),
    (2, 4, "workers", True),
    (2, 4, "graph", False),
    (2, 4, "across", False),
    (1, 4, "auto", False),
    (2, 1, "workers", False),
]


@pytest.mark.parametrize(("n", "m", "engine", "repeated"), REPEATED)
def test_what_depends_on_timing_is_counted_again(n: int, m: int, engine: str, repeated: bool) -> None:
    assert (memory.repetitions(n, m, engine) > 1) == repeated


# Peaks of the other version and of ours: is that more?
MORE = {
    "as much": ([10, 10, 10], [10, 10, 10], False),
    "a byte more": ([10, 10, 10], [11, 11, 11], True),
    "more once": ([10, 10, 10], [9, 10, 20], False),
    "more twice in three": ([10, 10, 10], [9, 11, 11], True),
    "more than the other's median": ([9, 10, 20], [11], True),
}


@pytest.mark.parametrize(("other", "auto", "more"), MORE.values(), ids=MORE)
def test_the_median_of_what_gpipe_chooses_must_not_be_above(other: list[int], auto: list[int], more: bool) -> None:
    peaks = {"a case": {"other": other, "auto": auto, "workers": [99]}}
    assert memory.above(peaks) == (["a case"] if more else [])


def test_a_run_is_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside itself, where nothing overlaps: exactly as much, so that it does not exit with 1."""
    monkeypatch.setattr(memory, "CASES", [("linear layers", 1, 2, "always")])
    memory.main(["--against", str(ROOT), "--json", str(tmp_path / "memory.json")])
    assert capsys.readouterr().out.count("1.000 to 1.000") == len(memory.ENGINES)
    (case,) = json.loads((tmp_path / "memory.json").read_text())["peak_bytes"].values()
    assert list(case) == ["other", *memory.ENGINES]
    assert case["other"] == case["auto"]


def test_more_is_said_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CASES", [("linear layers", 1, 2, "always")])
    monkeypatch.setattr(memory, "above", list)
    with pytest.raises(SystemExit, match=r"more than torchgpipe \S+ in 1 of 1 cases: linear layers, n=1 m=2 always"):
        memory.main(["--against", str(ROOT)])
