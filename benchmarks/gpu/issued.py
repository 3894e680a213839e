"""Measure what a step costs the host and the device, with several torchgpipe versions in turn.

`benchmarks.gpu.machinery` runs this module as a program. For each version, it forks two processes,
like `reproduce.regression.interleave`: one whose steps are timed, and one whose steps are recorded
by PyTorch's profiler. (A process that has used the profiler once can be slower ever after.)

Within these processes, nothing of torchgpipe may be used but `GPipe`, which all versions have.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from reproduce.error import Error
from reproduce.regression.interleave import Sampling, fork, interleave

DEVICE = torch._C._autograd.DeviceType.CUDA
"""The kind of device of kernels and copies in what the profiler records."""
WAIT = "called a synchronizing CUDA operation"
"""What PyTorch warns of if an operation makes the host wait for the device."""

Times = tuple[float, float, float | None]
"""Three times of a step in seconds, divided by the number of tasks.

They are the time until the host has issued the step, the time until the device has done it, and the
device's own time from the beginning of the step to its end, which is `None` on CPUs.
"""


class Step:
    """A training step of one way to run a model.

    Args:
        fields: The values of the fields of `Way` in `benchmarks.gates.machinery_child`.
    """

    def __init__(self, *fields: Any) -> None:
        # This module imports torchgpipe, which a process must not do before it is forked.
        from benchmarks.gates.machinery_child import Subject, Way

        way = Way(*fields)
        self.subject = Subject(way, _layers(way.model, way.n, way.device))
        self.on_gpu = way.device != "cpu"
        self.tasks = way.n * way.m

    def issue(self) -> None:
        """Issue forward and backward, without waiting for the device."""
        self.subject.run(self.subject.x).sum().backward()

    def timed(self) -> Times:
        """Run the step, and return its times."""
        self.drop_gradients()
        marks = []
        if self.on_gpu:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            marks[0].record()
        start = time.perf_counter()
        self.issue()
        issued = time.perf_counter()
        elapsed = None
        if self.on_gpu:
            marks[1].record()
            torch.cuda.synchronize()
            elapsed = marks[0].elapsed_time(marks[1]) / 1000 / self.tasks
        done = time.perf_counter()
        return (issued - start) / self.tasks, (done - start) / self.tasks, elapsed

    def drop_gradients(self) -> None:
        for parameter in self.subject.layers.parameters():
            parameter.grad = None


@cache
def _layers(model: str, n: int, device: str) -> nn.Sequential:
    """Build a model for n partitions. All ways to run it share its layers."""
    from benchmarks.gates.machinery_child import MODELS

    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[model].build(n)


def prepare(steps: int, *fields: Any) -> Callable[[], list[Times]]:
    """Return a function that times some steps; raise an error if the model cannot run."""
    step = Step(*fields)
    if step.on_gpu:
        torch.cuda.empty_cache()  # other processes need the memory that the last case took
    step.timed()
    return partial(_measure, step, steps)


def _measure(step: Step, steps: int) -> list[Times]:
    return [step.timed() for _ in range(steps)]


def prepare_profile(*fields: Any) -> Callable[[], dict[str, float]]:
    """Return a function that says how long the device works, and how often the host waits for it.

    On CPUs, it says nothing.
    """
    step = Step(*fields)
    step.timed()
    return partial(_profile, step)


def _profile(step: Step) -> dict[str, float]:
    if not step.on_gpu:
        return {}
    step.drop_gradients()  # otherwise, the step would also add its gradients to them
    found: dict[str, float] = {"waits": _waits(step)}
    step.drop_gradients()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step.issue()
        torch.cuda.synchronize()
    recorded: Any = profiler.profiler
    spans = []
    for event in recorded.kineto_results.events():
        if event.device_type() == DEVICE:
            start = event.start_ns()
            spans.append((start, start + event.duration_ns()))
    if spans:
        found["busy"] = covered(spans) / 1e9 / step.tasks
    step.drop_gradients()
    torch.cuda.empty_cache()  # other processes need the memory
    return found


def _waits(step: Step) -> int:
    """Count the operations of a step that make the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.issue()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(WAIT in str(warning.message) for warning in caught)


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """Return how long at least one of the spans lasts. A span has a start and an end."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def main(job: dict[str, Any]) -> None:
    """Measure all cases of a job; print a line of JSON for each.

    A case has a name, the number of rounds, the number of steps of a turn, and its ways: by name,
    the number of the folder, and the fields of `Way`. A line has the name of the case, and for each
    way either its samples and its profile or the reason why it could not run.
    """
    with ExitStack() as stack:
        timed: list[Connection] = []
        profiled: list[Connection] = []
        for folder in job["folders"]:
            for sides, maker in ((timed, "prepare"), (profiled, "prepare_profile")):
                side = fork(Path(folder), "torchgpipe", f"benchmarks.gpu.issued:{maker}")
                sides.append(stack.enter_context(side))
        for case in job["cases"]:
            steps = case["steps"]
            ways = {way: (side, (steps, *of)) for way, (side, of) in case["ways"].items()}
            line = _asked(timed, case["name"], ways, case["rounds"])
            line["profiles"] = _asked(profiled, case["name"], case["ways"], 1).get("samples", {})
            print(json.dumps(line), flush=True)


def _asked(
    sides: Sequence[Connection], case: str, ways: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Let processes run a case's ways in turn; return the samples, and why ways could not run."""
    found: dict[str, Any] = {"case": case}
    lines = interleave(lambda i: nullcontext(sides[i]), {case: ways}, Sampling(rounds, least=1))
    for line in lines:
        found |= line
    return found


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Error as error:
        sys.exit(str(error))
