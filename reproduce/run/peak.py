"""Run a memory experiment: count the published models' parameters, then measure every row's peak, one at a time.

On CUDA, PyTorch's caching allocator counts allocated and reserved bytes. A CPU has no such count, and a GPU that
stands for several devices has only one for all of them. In these cases `LiveBytes` counts live tensors.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.records.places import Json
from reproduce.run.failure import explain
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from reproduce.run.session import Session
from reproduce.run.training import FakeData, Training
from torchgpipe.trace.parts import tensors_in

FLOAT_BYTES = 4
Peak = dict[str, list[int]]  # name of the count -> peak bytes on each of the training's devices


def measure_peak(
    training: Training,
    devices: Devices,
    *,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
) -> Peak:
    """Run whole steps and return `peak_allocated`, the most bytes of tensors, and on CUDA also `peak_reserved`.

    Use at least two steps: an optimizer allocates its state at the end of the first. No other tensors should be alive
    on the devices. `before` is called with the number of each step.
    """

    def run() -> None:
        for step in range(steps):
            before(step)
            training.step()

    alone = devices.kind == "cuda" and len(set(training.devices)) == len(training.devices)
    return _measure_cuda(training, devices, run) if alone else _measure_live(training, run)


def _measure_cuda(training: Training, devices: Devices, run: Callable[[], None]) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    for device in training.devices:
        torch.cuda.reset_peak_memory_stats(device)
    run()
    devices.synchronize()
    return {
        "peak_allocated": [torch.cuda.max_memory_allocated(device) for device in training.devices],
        "peak_reserved": [torch.cuda.max_memory_reserved(device) for device in training.devices],
    }


def _measure_live(training: Training, run: Callable[[], None]) -> Peak:
    counter = LiveBytes(len(training.devices))
    for device, partition in enumerate(training.partitions):
        counter.add([*partition.parameters(), *partition.buffers()], device)
    counter.add(tensors_in(training.input), 0)
    counter.add(tensors_in(training.target), len(training.devices) - 1)

    pipelined = training.row.partitions is not None
    observed = training.observed(lambda task: LiveBytesMode(counter, task.partition))
    with observed if pipelined else contextlib.nullcontext(), LiveBytesMode(counter):
        run()
    return {"peak_allocated": counter.peak}


def plan_memory(session: Session) -> None:
    """Tell the progress display how many steps are to come."""
    for row in session.scale.rows:
        session.recorder.put(session.result(row, status="interrupted"))
        session.progress.plan(session.job(row.name), session.scale.steps, row.work())


def run_memory(session: Session) -> Iterator[tuple[str, bool]]:
    """Record sizes and peaks of every row, even if others fail; at the end yield their only group's name, ""."""
    counts = (
        session.devices.kind != "meta" and session.experiment.table
    )  # meta runs rows of the published size anyway
    for row in session.experiment.scale("paper").rows if counts else ():
        session.start(f"{row.name}, counting parameters")
        session.recorder.put(
            session.result(row, scale="paper", device="meta", values=_model_values(row))
        )

    for row in session.scale.rows:  # one device may stand for several, as nothing is timed
        try:
            used, values = measure_memory(session, row, session.scale.steps)
        except Exception as error:
            session.put(row, **explain(error)._asdict())
            session.progress.finish(session.job(row.name))
        else:
            session.put(used, values=values)
            peaks: Any = values["peak_allocated"]
            session.progress.say(
                f"{row.name}: peaks of {sum(peaks) / 2**20:,.0f} MiB, all devices together"
            )
        finally:
            session.progress.stop()
    yield "", True


def measure_memory(session: Session, row: Row, steps: int) -> tuple[Row, dict[str, Json]]:
    """Return the row as it was run, balance included, and its model's size and peak memory."""
    session.free()
    session.start(f"{row.name}, building")
    training = Training(
        row, session.devices, FakeData([row], session.seed), session.balancer, session.seed
    )

    def before(step: int) -> None:
        session.start(f"{row.name}, memory, step {step + 1} of {steps}", session.job(row.name))

    peak = measure_peak(training, session.devices, steps=steps, before=before)
    return training.row, {**_model_values(row), **peak}


def _model_values(row: Row) -> dict[str, Json]:
    """Count the model's parameters, exactly, and the bytes of parameters, gradients and optimizer state."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in row.sized.layers().parameters())
    return {
        "parameters": parameters,
        "model_bytes": parameters * FLOAT_BYTES * (2 + row.optimizer.state),
    }
