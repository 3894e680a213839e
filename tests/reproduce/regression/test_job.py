"""The job: its lines by case, and how it says that it broke off."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from reproduce.regression.job import JobError, Samples, Settings, collect, interleaved
from reproduce.regression.trees import Tree


def test_lines_become_samples_of_cases() -> None:
    told: list[int] = []
    lines = [
        {"case": "b", "unable": {"base": "ImportError: x"}},
        {"case": "a", "restart": 0, "base": [1.0], "head": [2.0]},
        {"case": "a", "restart": 1, "base": [3.0], "head": [4.0]},
    ]
    found = collect(lines, ["a", "b"], told.append)
    assert found == {
        "a": Samples(base=[[1.0], [3.0]], head=[[2.0], [4.0]]),
        "b": Samples(unable={"base": "ImportError: x"}),
    }
    assert told == [1, 2]


def test_a_job_that_breaks_off_says_why(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "nothing", None)
    lines = interleaved(tree, tree, Settings(["machinery never"]))
    with contextlib.closing(lines), pytest.raises(JobError, match=r"exit code 2: .*there is no torchgpipe in"):
        next(lines)
