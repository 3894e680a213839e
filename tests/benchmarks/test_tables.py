"""Blocks of benchmarks' records: the table and circumstances that the file says, or one line about what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import summarized
from benchmarks.render import block as benchmark_block
from reproduce.error import Error
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import FREED_MEMORY, Record, Result, Run, save


def written(folder: Path, name: str, cases: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    run = Run(
        state="finished", command=[], seed=0, started="2026-01-02T03:04:05Z", ended=None, device="cpu", devices=2,
        threads_per_device=1, machine=Machine("Linux", "a CPU", 4, 4, None, [Gpu("a GPU", 2**30)]),
        versions={"torch": "2.11.0", "python": "3.12.1"}, git=Git("0123456789abcdef", True), load=[0.251, 0.0, 0.0],
        settings={FREED_MEMORY: "kept"},
    )  # fmt: skip
    results = [
        summarized(Result(case, way, "measured", config={"version": f"torchgpipe {way}"}, samples=samples))
        for case, ways in cases.items()
        for way, samples in ways.items()
    ]
    save(Record(name, "a title", "measured", {}, results, run=run), folder / f"{name}.json")


def times(forward: float, backward: float) -> dict[str, list[float]]:
    return {"forward": [forward] * 3, "backward": [backward] * 3, "both": [forward + backward] * 3}


# Of each benchmark whose table has columns that no committed record has: a record, and parts of the table.
TABLES: dict[str, tuple[dict[str, dict[str, dict[str, list[float]]]], list[str]]] = {
    "machinery": (
        {
            "n=1": {"plain": times(2, 2), "other": times(20, 20), "graph": times(5, 5)},
            "n=2": {"plain": times(1, 1), "other": times(4, 6), "graph": times(1, 1), "workers": times(2, 3)},
            "n=3": {"plain": times(2, 3), "workers, other": times(1, 1), "graph": times(5, 5), "workers": times(4, 4)},
        },
        [
            "|case|plain loop|other|graph|ratio|workers, other|workers|ratio|",
            "|n=1|2 + 2|20 + 20|5 + 5|0.25||||",
            "|n=2|1 + 1|4 + 6|1 + 1|0.20||2 + 3|0.50|",
            "|n=3|2 + 3||5 + 5|2.00|1 + 1|4 + 4|4.00|",
        ],
    ),
    "overlap": (
        {
            "a model": {
                "naive": {"time": [4.0, 4.0, 4.0], "x naive": [1.0] * 3},
                "GPipe m=4": {"time": [2.0, 2.5, 2.0], "x naive": [2.0, 1.6, 2.0]},
            }
        },
        ["a model, 3 rounds", "|GPipe m=4|2.000|2.000-2.500|2.00|"],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_record_is_shown(name: str, tmp_path: Path) -> None:
    cases, parts = TABLES[name]
    written(tmp_path, f"{name}-here", cases)
    block = benchmark_block(tmp_path / "page.md", f"{name}-here", tmp_path)
    narrow = "\n".join("|".join(cell.strip() for cell in line.split("|")) for line in block.splitlines())
    for part in parts:
        assert part in narrow, part
    assert (
        "\nMeasured 2026-01-02, torch 2.11.0, Python 3.12.1, a GPU, a CPU, 4 cores, freed memory kept, load 0.25 "
        f"before the start, revision 012345678, with changes; [record]({name}-here.json)\n"
    ) in block


def test_what_was_not_measured_yet_is_said(tmp_path: Path) -> None:
    for name in ("machinery", "overlap-later", "conformance"):
        assert benchmark_block(tmp_path / "page.md", name, tmp_path) == "Nothing measured is committed yet.\n"


@pytest.mark.parametrize("name", ["overlap", "nothing"])
def test_one_that_cannot_be_shown_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    written(tmp_path, name, {"a case": {"a way": {}}})
    with pytest.raises(Error, match=rf"page\.md: the block from benchmarks/{name} cannot be made \(.*{name}\.json"):
        benchmark_block(tmp_path / "page.md", name, tmp_path)
