"""Measure the time that a step takes on the host and the device, for several torchgpipe versions.

`benchmarks.gpu.machinery` runs this module as a program. For each version, the program forks two
processes with `reproduce.regression.interleave`. In the first process, steps are timed. In the
second process, PyTorch's profiler records steps. The second process is needed because the profiler
can make all later steps of its process slower.

Of torchgpipe, code in these processes may use only `GPipe`, which all versions have.
"""

import json
import re
import sys
import time
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
from reproduce.machine.issuing import host_seconds
from reproduce.regression.interleave import Sampling, fork, interleave

DEVICE = torch._C._autograd.DeviceType.CUDA
"""The kind of device of kernels and copies in what the profiler records."""
WAIT = re.compile(r"cu\w*Synchronize|cudaMemcpy$|cudaFree$")
"""Matches the names of CUDA's functions in which the host waits for the device."""

Times = tuple[float, float, float | None]
"""Three times of a step in seconds, divided by the number of tasks.

They are the time that the host takes to issue the step, the time until the device has done it, and
the device's own time from the beginning of the step to its end, which is `None` on CPUs.
"""
Call = tuple[str, bool, int, int]
"""What the profiler has recorded: its name, whether it ran on the device, its start and its end.

What did not run on the device is a call of CUDA by the host. Start and end are in nanoseconds.
"""


class Step:
    """A forward and backward of a model, run by a plain loop or by a version of torchgpipe.

    Args:
        fields: The values of the fields of `Way` in `benchmarks.gates.machinery_child`. They name
            the model, its partitions and micro-batches, the device, and what runs the model.
    """

    def __init__(self, *fields: Any) -> None:
        # This module imports torchgpipe, which a process must not do before it is forked.
        from benchmarks.gates.machinery_child import Subject, Way

        way = Way(*fields)
        self.subject = Subject(way, _layers(way.model, way.n, way.device))
        self.on_gpu = way.device != "cpu"
        self.tasks = way.n * way.m

    def issue(self) -> None:
        """Launch the kernels of a forward and a backward, without waiting for the device."""
        self.subject.run(self.subject.x).sum().backward()

    def timed(self) -> Times:
        """Run the step, and return its times."""
        self.drop_gradients()
        marks = []
        if self.on_gpu:
            marks = [torch.Event("cuda", enable_timing=True) for _ in range(2)]
            torch.accelerator.synchronize()
            marks[0].record()
        start = time.perf_counter()
        self.issue()
        issued = time.perf_counter()
        elapsed = None
        if self.on_gpu:
            marks[1].record()
            torch.accelerator.synchronize()
            elapsed = marks[0].elapsed_time(marks[1]) / 1000 / self.tasks
        done = time.perf_counter()
        host = min(issued - start, self.host_seconds())
        return host / self.tasks, (done - start) / self.tasks, elapsed

    def host_seconds(self) -> float:
        """Return the seconds in which the host launches a step's kernels, measured with pauses.

        In a pause, a hook waits until the device has finished all work. So the queue of kernel
        launches never gets full. Without pauses, a full queue would make the host wait, and the
        measured time could be too high. With pauses, the time can be a little too high as well,
        because the hooks themselves take some time. The time is never too low.
        """
        self.drop_gradients()
        return host_seconds(self.issue, self.subject.layers, self.wait)

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.on_gpu:
            torch.accelerator.synchronize()

    def drop_gradients(self) -> None:
        for parameter in self.subject.layers.parameters():
            parameter.grad = None


@cache
def _layers(model: str, n: int, device: str) -> nn.Sequential:
    """Build a model for n partitions, or return the same layers if they were built before."""
    from benchmarks.gates.machinery_child import MODELS

    torch.manual_seed(0)
    if device == "cpu":
        return MODELS[model].build(n)
    with torch.device(device):
        return MODELS[model].build(n)


def prepare(steps: int, *fields: Any) -> Callable[[], list[Times]]:
    """Return a function that times `steps` training steps.

    Before this function returns, it runs one step. So if the model cannot run, the error is raised
    at once. `fields` are the arguments of `Step`.
    """
    step = Step(*fields)
    if step.on_gpu:
        torch.accelerator.empty_cache()  # other processes need the memory that the last case took
    step.timed()
    return partial(_measure, step, steps)


def _measure(step: Step, steps: int) -> list[Times]:
    return [step.timed() for _ in range(steps)]


def prepare_profile(*fields: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that profiles a step: how long the device works, how often the host waits.

    The returned function gives a dictionary, as `summed_up` does. On CPUs, the dictionary is empty.
    If the profiler fails, the dictionary's field "failed" has the reason.
    """
    step = Step(*fields)
    if not step.on_gpu:
        return dict
    step.timed()
    return partial(_profile, step)


def _profile(step: Step) -> dict[str, Any]:
    step.drop_gradients()  # otherwise, the step would also add its gradients to them
    try:
        nothing = _recorded_of_nothing()
        return summed_up(_recorded(step.issue), nothing, step.tasks)
    except Exception as error:  # the other ways and the other cases can still be measured
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        step.drop_gradients()
        torch.accelerator.empty_cache()  # other processes need the memory


@cache
def _recorded_of_nothing() -> list[Call]:
    """Return the calls of CUDA that the profiler records if nothing runs: its own calls."""
    _recorded(lambda: None)  # the first time, the profiler also starts
    return _recorded(lambda: None)


def _recorded(run: Callable[[], object]) -> list[Call]:
    """Call `run` with PyTorch's profiler; return the device's work and the host's CUDA calls."""
    torch.accelerator.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.accelerator.synchronize()
    recorded: Any = profiler.profiler
    calls = []
    for event in recorded.kineto_results.events():
        start = event.start_ns()
        on_device = event.device_type() == DEVICE
        calls.append((event.name(), on_device, start, start + event.duration_ns()))
    return calls


def summed_up(calls: Sequence[Call], nothing: Sequence[Call], tasks: int) -> dict[str, Any]:
    """Return how often the host waited in a step, and how long the device worked for each task.

    The returned dictionary has the fields "waits" (how often) and "busy" (seconds). If the profiler
    has not recorded the host's calls or the device's work, the field "failed" says so.

    Args:
        calls: What the profiler has recorded in the step.
        nothing: What the profiler has recorded without a step: its own calls of CUDA.
        tasks: The number of tasks in the step.
    """
    spans = [(start, end) for _, on_device, start, end in calls if on_device]
    found: dict[str, Any] = {}
    if spans:
        found["busy"] = covered(spans) / 1e9 / tasks
    else:
        found["failed"] = "the profiler has recorded no work of the device"
    if len(calls) > len(spans):
        found["waits"] = _waits(calls) - _waits(nothing)
    else:
        found["failed"] = "the profiler has recorded no calls of CUDA by the host"
    return found


def _waits(calls: Sequence[Call]) -> int:
    """Count the calls of CUDA in which the host waits for the device.

    Some come from explicit calls, such as `torch.Event.synchronize`, and others from operators that
    have to wait, such as `Tensor.item`.
    """
    names = [name for name, on_device, *_ in calls if not on_device]
    return sum(WAIT.match(name) is not None for name in names)


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many nanoseconds at least one span covers. A span has a start and an end."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def main(job: dict[str, Any]) -> None:
    """Measure all cases of a job, and print a line of JSON for each case.

    A job has a list of folders, each with a version of torchgpipe, and a list of cases. Each case
    has a name, a number of rounds, the number of steps to time in each round, and several ways to
    run its model. A way consists of the index of a folder, and the fields of `Way`.

    A printed line has the name of the case. For each way, the line has the measured times and the
    profile, or the reason why the model could not be run or profiled in this way.
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
            profiles = _asked(profiled, case["name"], case["ways"], 1)
            line["profiles"] = profiles.get("samples", {})
            line["not profiled"] = profiles.get("unable", {})
            print(json.dumps(line), flush=True)


def _asked(
    sides: Sequence[Connection], case: str, ways: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Let processes run a model in several ways, and measure each way.

    A way is, for example, a plain loop over the layers, or a pipeline of one torchgpipe version.

    Args:
        sides: The connections to the processes, one for each folder with a torchgpipe.
        case: The name of the case (the model to run).
        ways: Maps each way to the index of its process, and to the arguments of the measurement.
        rounds: How often each way is measured.

    Returns:
        The measured values for each way, or the reason why the model cannot run in this way.
    """
    found: dict[str, Any] = {"case": case}
    lines = interleave(lambda i: nullcontext(sides[i]), {case: ways}, Sampling(rounds, least=1))
    try:
        for line in lines:
            found |= line
    except Error as error:  # a way failed after it had run; the next cases can still run
        found["unable"] = dict.fromkeys(ways, str(error))
    return found


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Error as error:
        sys.exit(str(error))
