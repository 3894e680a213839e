"""Count the functions of the library that run in a training step, and their calls.

To understand a step, a reader has to know all of these functions. The numbers are committed, so
that a diff shows when they grow. `python -m tests.test_path` prints the current numbers.
"""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe

LIBRARY = str(Path(__file__).resolve().parents[1] / "torchgpipe")
PYTHON = (3, 11)
"""The version of Python to count with. Other versions make other frames for comprehensions."""
TASKS = 8
"""The number of tasks in a step, which has 4 micro-batches and 2 stages."""

# A key is the engine, the mode of checkpointing, and the schedule of `step`, or "" for a step that
# calls `model(x)`. A value is the number of functions that run in a step, and the number of their
# calls. The number of calls divided by `TASKS` is the number of calls for each task.
EXPECTED = {
    ("workers", "except_last", ""): (203, 1000),
    ("workers", "never", ""): (168, 688),
    ("workers", "except_last", "1F1B"): (238, 1040),
    ("graph", "except_last", ""): (172, 1040),
    ("graph", "never", ""): (74, 259),
    ("graph", "except_last", "1F1B"): (218, 955),
}


def ran(engine: Any, checkpoint: Any, schedule: str) -> tuple[int, int]:
    """Return how many functions of the library run in a step, and how often they are called."""
    seen = Counter[CodeType]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        own = code.co_filename.startswith(LIBRARY) and not code.co_name.startswith("<")
        if event == "call" and own:
            seen[code] += 1

    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    options: dict[str, Any] = {"schedule": schedule} if schedule else {}
    x, target = torch.rand(16, 8), torch.rand(16, 8)
    devices = ["cpu", "cpu"]
    # `setprofile` is for threads that start later. A pipeline starts its threads in its first step.
    threading.setprofile(watch)
    try:
        model = GPipe(
            layers,
            [2, 2],
            devices=devices,
            chunks=4,
            checkpoint=checkpoint,
            engine=engine,
            **options,
        )

        def step() -> None:
            if schedule:
                model.step(nn.functional.mse_loss, x, target)
            else:
                nn.functional.mse_loss(model(x), target).backward()

        for _ in range(4):  # the fifth step is like most: it does not look at losses' graphs
            step()
        seen.clear()
        sys.setprofile(watch)
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(seen), seen.total()


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="the numbers are those of one version")
@pytest.mark.parametrize("key", EXPECTED)
def test_what_runs_in_a_step(key: tuple[str, str, str]) -> None:
    assert ran(*key) == EXPECTED[key]


def main() -> None:
    """Print the numbers of the current code."""
    for key in EXPECTED:
        functions, calls = ran(*key)
        print(f"    {key}: ({functions}, {calls}),  # {calls / TASKS:.0f} calls for each task")


if __name__ == "__main__":
    main()
