"""Made-up measurements for `python -m benchmarks.gpu`, and functions that read their results.

The program runs a list of measurements, called parts, and writes a page with their results.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.frame.page import OUTCOME
from benchmarks.gpu.frame.processes import Outcome
from benchmarks.gpu.part import RESULT, Context, Fields

Run = Callable[[Context], Fields]


class Fake:
    """A made-up part (measurement) of `python -m benchmarks.gpu`, which runs a given function.

    The page of results shows each name and value that the function returns.
    """

    PURPOSE = "a question"

    def __init__(self, run: Run, share: float = 20.0, needs: Sequence[str] = ()) -> None:
        self.run = run
        self.SHARE = share
        self.NEEDS = needs

    def lines(self, result: Fields) -> list[str]:
        return [f"{name} is {value}" for name, value in result.items()]


def answers(context: Context) -> Fields:
    context.write({"answer": 41})
    return {"answer": 42}


def outcome(folder: Path, name: str) -> Outcome:
    return msgspec.json.decode((folder / name / OUTCOME).read_bytes(), type=Outcome)


def result(folder: Path, name: str) -> Any:
    return json.loads((folder / name / RESULT).read_text())
