"""Run a memory experiment: count the models' parameters, and measure the peak memory of each row.

A row is a configuration of the experiment. On GPUs, PyTorch's caching allocator counts allocated
and reserved bytes. In two cases, `LiveBytes` counts the bytes of all tensors in memory instead:

- on a CPU, where PyTorch's allocator counts no bytes;
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
from reproduce.records.record import SUCCESS
from reproduce.run.engines.failure import explain
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from reproduce.run.session import GroupDone, Session
from reproduce.run.training import FakeData, Training
from torchgpipe.trace.parts import tensors_in

FLOAT_BYTES = 4
COUNTING = 1.5
"""By what factor a step takes longer if its bytes are counted, roughly."""
Peak = dict[str, list[int]]
"""Maps a kind of bytes, such as `allocated`, to the peak of these bytes on each device."""


def _do_nothing(step: int) -> None:
    pass


def measure_peak(
    training: Training,
    devices: Devices,
    *,
    steps: int,
    before: Callable[[int], None] = _do_nothing,
) -> Peak:
    """Run training steps, and return the peak memory of each device in bytes.

    In the result, the key `peak_allocated` has the most bytes that tensors took at any time. If
    each device is a GPU of its own, the key `peak_reserved` has the most bytes that the caching
    allocator reserved. There should be no other tensors on the devices, because they would be
    counted, too.

    Args:
        training: The training to run.
        devices: The devices of this machine.
        steps: The number of steps. It should be at least two, because an optimizer allocates its
            state at the end of the first step.
        before: A function that is called before each step, with the number of the step.
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
    """Record which rows (configurations) will run; tell the progress display how many steps."""
    for row in _rows_without_numbers(session):
        session.plan(row)
        plan_peak(session, row, session.scale.steps, row.name)


def _rows_without_numbers(session: Session) -> list[Row]:
    """Return the rows (configurations) that have no numbers yet.

    An interrupted run that is continued has numbers of some rows already.
    """
    rows = []
    for row in session.scale.rows:
        found = session.found(row)
        if found is None or found.status not in SUCCESS:
            rows.append(row)
    return rows


def plan_peak(session: Session, row: Row, steps: int, job: str) -> None:
    """Tell the progress display how many steps measure the memory of a row (configuration).

    Building the model counts as one step. `job` is the name of the row in the progress display.
    """
    work = COUNTING * row.work() / min(row.devices, session.devices.count)
    session.progress.plan(session.job(job), 1 + steps, session.guess(row, work))


def run_memory(session: Session) -> Iterator[GroupDone]:
    """Record the model size and peak memory of every row (configuration), even if some rows fail.

    If an interrupted run is continued, rows that have numbers already are not run again.

    At the end, yield ("", True), which means that the table of all rows can be shown. The first
    item is the name of a group of rows, and is empty because there is only one group.
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

    rows = _rows_without_numbers(session)
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
    """Train a row (configuration) for some steps, and measure its memory.

    If this machine has too few devices, one of them takes the place of several. This does not
    matter here, because nothing is timed.

    Args:
        session: The running experiment.
        row: The row.
        steps: The number of steps to run.
        job: The name of the row's steps in the progress display.
        which: A text for the progress display that says which row runs.

    Returns:
        The row with its balance (the layers of each partition), which may have been found by
        profiling, and values for the record: the size of the model and the peak memory.
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
    """Return the number of a model's parameters, and the bytes that the model takes in training.

    The bytes are those of the parameters, their gradients and the optimizer's state.
    """
    with torch.device("meta"):
        layers = row.sized.layers()
    parameters = sum(parameter.numel() for parameter in layers.parameters())
    values_each = 2 + row.optimizer.state  # the parameter, its gradient and the optimizer's values
    model_bytes = parameters * FLOAT_BYTES * values_each
    return {"parameters": parameters, "model_bytes": model_bytes}
