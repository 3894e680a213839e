"""Blocks of benchmark results: the table and circumstances that the kept file says, or one line about what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.circumstances import keep
from reproduce.error import Error
from reproduce.tables.benchmark_block import benchmark_block

UNDER = {
    "when": "2026-01-02T03:04:05+00:00", "torch": "2.11.0", "python": "3.12.1", "cpu": "a CPU", "cores": 4,
    "load": 0.25, "revision": "0123456789abcdef", "dirty": True,
}  # fmt: skip
RESULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "machinery": (
        {
            "versions": {"here": "ours", "other": "theirs"},
            "us_per_task": {
                "n=1": {"plain": [[1, 2], [3, 2]], "other": [[20, 20], [20, 20]], "graph": [[4, 5], [6, 5]]},
                "n=2": {"plain": [[1, 1]], "other": [[4, 6]], "graph": [[1, 1]], "workers": [[2, 3]]},
            },
        },
        ["| n=1 | 2 + 2 | 20 + 20 | 5 + 5 | 0.25 | | |", "| n=2 | 1 + 1 | 4 + 6 | 1 + 1 | 0.20 | 2 + 3 | 0.50 |"],
    ),
    "overlap": (
        {
            "what": "a model",
            "seconds": {
                "naive": [4.0, 4.0, 4.0],
                "GPipe m=4": [2.0, 2.5, 2.0],
                "ScheduleGPipe m=4": [2.2, 2.5, 2.3],
                "ScheduleGPipe m=8": [1.0, 1.0, 1.0],
            },
            "replay": {"GPipe m=4": 1.5},
            "replay if it waited": {"GPipe m=4": 1.75},
        },
        ["a model, 3 rounds", "| GPipe m=4", "| 2.00 ", "| 1.10 ", "| 1.500 ", "| 75% ", "| 1.750 "],
    ),
    "decisions": (
        {"seconds": {"a partition is at most one task ahead of the next": {"with": [0.3, 0.3], "without": [0.6, 0.2]}}},
        ["| a partition is at most one task ahead of the next", "| 300 / 400 ms a step", "| 1.00 ", "kept, for memory"],
    ),
    "memory": (
        {
            "versions": {"here": "ours", "other": "theirs"},
            "peak_bytes": {
                "a, n=1 m=1 always": {"other": [2**21], "auto": [2**20], "workers": [2**22]},
                "a, n=2 m=4 always": {"other": [2**21] * 3, "auto": [2**20, 2**20, 2**22], "workers": [2**20] * 3},
            },
        },
        [
            "| a, always",
            "0.500 to 0.500, once 2.000",
            "0.500 to 2.000 ",
            "| a, n=1 m=1 always | workers | 2.0000 ",
            "| a, n=2 m=4 always | auto    | 0.5000   | 2.0000    | 4.000 of 2.000 ",
        ],
    ),
    "steps": (
        {
            "what": "batch 4",
            "versions": {"plain": "plain loop", "here": "ours"},
            "cases": {"a": {"plain": {"seconds": [0.3, 0.3]}, "here": {"seconds": [0.1, 0.2]}}},
        },
        ["batch 4", "| plain loop, ms ", "| 300.0 ", "| 150.0 ", "| 2.25 ", "lowest 2.25"],
    ),
    "validation": (
        {
            "models": {
                "a model": {
                    "profiles": {
                        "4": {
                            how: {kind: [[0.5]] for kind in ("forward", "graph", "backward")}
                            for how in ("alone", "shared")
                        }
                    },
                    "configurations": {
                        "n=1 m=1 never": {
                            "batch_size": 4,
                            "balance": [1],
                            "chunks": 1,
                            "checkpoint": "never",
                            "seconds": [1.25, 0.8, 0.5],
                        },
                    },
                },
            },
        },
        ["1 configurations, 3 rounds", "| predicted ms ", "| measured ms ", "| 1000 ", "| 800 ", "| +25.0% ", "10%"],
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_kept_result_is_shown(name: str, tmp_path: Path) -> None:
    result, said = RESULTS[name]
    keep(tmp_path / "kept.json", name, UNDER, result)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]
    block = " ".join(benchmark_block(tmp_path / "page.md", "kept", tmp_path).split())  # however wide the columns are
    for text in [*said, "2026-01-02", "torch 2.11.0", "a CPU, 4 cores", "012345678, with changes", "(kept.json)"]:
        assert " ".join(text.split()) in block, text


def test_what_was_not_measured_yet_is_said(tmp_path: Path) -> None:
    for name in ("validation", "overlap-later", "regression"):
        assert benchmark_block(tmp_path / "page.md", name, tmp_path) == "Nothing measured is committed yet.\n"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"benchmark": "none", "circumstances": {}}', '{"benchmark": "overlap", "circumstances": {}}'],
)
def test_a_broken_one_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(Error, match=r"page\.md: the block from benchmarks/kept cannot be made \(.*kept\.json"):
        benchmark_block(tmp_path / "page.md", "kept", tmp_path)
