"""Run a memory experiment: count the published models' parameters, and measure each row's peak.

On GPUs, PyTorch's caching allocator counts allocated and reserved bytes. In two cases, `LiveBytes`
counts the bytes of live tensors instead:

- on a CPU, where PyTorch's allocator does not count bytes;
- if one GPU takes the place of several devices, because the allocator cannot tell them apart.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.records.places import Json
from reproduce.run.engines.failure import explain
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from reproduce.run.session import GroupDone, Session
from reproduce.run.training import FakeData, Training
from torchgpipe.trace.parts import tensors_in

FLOAT_BYTES = 4
COUNTING = 1.5  # a step whose bytes are counted takes about this number of times longer
Peak = dict[str, list[int]]  # name of the count -> peak bytes on each of the training's devices


def _do_nothing(step: int) -> None:
    pass


def measure_peak(
    training: Training,
    devices: Devices,
    *,
    steps: int,
    before: Callable[[int], None] = _do_nothing,
) -> Peak:
    """Run training steps, and return the peak memory of each device.

    The key `peak_allocated` has the most bytes that tensors took. If each device is a GPU of its
    own, the key `peak_reserved` has the most bytes that the caching allocator reserved. There
    should be no other tensors on the devices, because they would be counted, too.

    Args:
        training: The training to run.
        devices: The devices of this machine.
        steps: The number of steps. It should be at least two, because an optimizer allocates its
            state at the end of the first step.
        before: A function that is called with the number of a step before the step.
    """

    def run() -> None:
        for step in range(steps):
            before(step)
            training.step()

    different = set(training.devices)
    if devices.kind == "cuda" and len(different) == len(training.devices):
        return _measure_cuda(training, devices, run)
    return _measure_live(training, run)


def _measure_cuda(training: Training, devices: Devices, run: Callable[[], None]) -> Peak:
    gc.collect()
    torch.accelerator.empty_cache()
    for device in training.devices:
        torch.accelerator.reset_peak_memory_stats(device)
    run()
    devices.synchronize()
    peak: Peak = {"peak_allocated": [], "peak_reserved": []}
    for device in training.devices:
        allocated = torch.accelerator.max_memory_allocated(device)
        reserved = torch.accelerator.max_memory_reserved(device)
        peak["peak_allocated"].append(allocated)
        peak["peak_reserved"].append(reserved)
    return peak


def _measure_live(training: Training, run: Callable[[], None]) -> Peak:
    devices = len(training.devices)
    counter = LiveBytes(devices)
    for device, partition in enumerate(training.partitions):
        counter.add(partition.parameters(), device)
        counter.add(partition.buffers(), device)
    counter.add(tensors_in(training.input), 0)
    counter.add(tensors_in(training.target), devices - 1)

    watched: Any = contextlib.nullcontext()
    if training.row.partitions is not None:
        watched = training.observed(lambda task: LiveBytesMode(counter, task.partition))
    with watched, LiveBytesMode(counter):
        run()
    return {"peak_allocated": counter.peak}


def plan_memory(session: Session) -> None:
    """Record which rows will run, and tell the progress display how many steps they have."""
    scale = session.scale
    for row in scale.rows:
        session.plan(row)
        plan_peak(session, row, scale.steps, row.name)


def plan_peak(session: Session, row: Row, steps: int, job: str) -> None:
    """Tell the progress display about the steps that measure a row's memory.

    Building the model counts as one step.
    """
    work = COUNTING * row.work() / min(row.devices, session.devices.count)
    session.progress.plan(session.job(job), 1 + steps, session.guess(row, work))


def run_memory(session: Session) -> Iterator[GroupDone]:
    """Record model sizes and memory peaks of every row, even if some rows fail.

    All rows are in one group, whose name is "". At the end, yield this name, and True, which means
    that the group is finished.
    """
    experiment = session.experiment
    # On `meta`, rows with models of the published sizes run anyway.
    if session.devices.kind != "meta" and experiment.table:
        paper = experiment.scale("paper")
        for number, row in enumerate(paper.rows, 1):
            which = f"row {number} of {len(paper.rows)}: {row.name}"
            session.start(f"counting parameters, {which}")
            values = model_values(row)
            result = session.result(row, scale="paper", device="meta", values=values)
            session.recorder.put(result)

    rows = session.scale.rows
    for number, row in enumerate(rows, 1):
        which = f"row {number} of {len(rows)}: {row.name}"
        try:
            used, values = measure_memory(session, row, session.scale.steps, row.name, which)
        except Exception as error:  # go on with the next row
            failure = explain(error)
            session.put(row, status=failure.status, reason=failure.reason)
        else:
            session.put(used, values=values)
            mebibytes = sum(values["peak_allocated"]) / 2**20
            session.progress.say(f"{row.name}: peaks of {mebibytes:,.0f} MiB, all devices together")
        finally:
            session.finish(row.name)
            session.progress.stop()
    yield "", True


def measure_memory(
    session: Session, row: Row, steps: int, job: str, which: str
) -> tuple[Row, dict[str, Json]]:
    """Run a row to measure its memory.

    If this machine has too few devices, one of them takes the place of several. This does not
    matter here, because nothing is timed.

    Args:
        session: The session.
        row: The row.
        steps: The number of steps to run.
        job: The name of the job in the progress display.
        which: The text that names the row there.

    Returns:
        The row with the balance in use, and values for the record: the size of the model and the
        peak memory.
    """
    session.free()
    session.start(f"building, {which}", session.job(job), typical=False)
    data = FakeData([row], session.seed)
    training = Training(row, session.devices, data, session.balancer, session.seed)

    def before(step: int) -> None:
        text = f"memory, step {step + 1} of {steps}, {which}"
        session.start(text, session.job(job))

    peak = measure_peak(training, session.devices, steps=steps, before=before)
    return training.row, {**model_values(row), **peak}


def model_values(row: Row) -> dict[str, Json]:
    """Count the model's parameters, and the bytes of parameters, gradients and optimizer state."""
    with torch.device("meta"):
        layers = row.sized.layers()
    parameters = sum(parameter.numel() for parameter in layers.parameters())
    values_each = 2 + row.optimizer.state  # the parameter, its gradient and the optimizer's values
    model_bytes = parameters * FLOAT_BYTES * values_each
    return {"parameters": parameters, "model_bytes": model_bytes}
