"""Record what overlaps on a GPU and the host, and compare the timeline with a simulation (replay).

The GPU and the host are the two devices of a pipeline. Components of the pipeline are switched on
one after another, as in the papers' ablation study:

- nothing: no component is on. The order of tasks in backward is not fixed, and copies run on the
  streams that compute.
- dependency: the order of tasks is fixed. So a device can recompute a task before the gradient for
  its backward arrives.
- streams: in addition, copies have streams of their own.

The third component of the study, portals (direct copies of skips), is left out: it has no effect on
a pipeline of two devices.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.part import Context, Fields
from torchgpipe import GPipe
from torchgpipe.plan.predict.replay import Costs, replay
from torchgpipe.schedules import Kind
from torchgpipe.schedules.replay import Event, Timeline
from torchgpipe.timeline import record

PURPOSE = "what overlaps on the GPU and the host as two devices, and whether the replay says so"
SHARE = 1
NEEDS: list[str] = []

M = 8
"""The number of micro-batches."""
COMPONENTS = {
    "nothing": (),
    "dependency": ("dependency",),
    "dependency, streams": ("dependency", "streams"),
}


class Sizes(NamedTuple):
    """The sizes of the layers, and how many steps are recorded.

    Attributes:
        width: The width of the linear layers.
        samples: The number of samples in a micro-batch.
        on_host: The number of layers in the partition on the host.
        on_gpu: The number of layers in the partition on the GPU.
        steps: The number of recorded steps.
    """

    width: int
    samples: int
    on_host: int
    on_gpu: int
    steps: int


SIZES = {"paper": Sizes(2048, 256, 1, 96, 5), "tiny": Sizes(64, 8, 1, 2, 2)}


def run(context: Context) -> Fields:
    """Record steps with each set of components, with the host or the GPU as the first device."""
    gpu = context.devices[0]
    host = torch.device("cpu")
    orders = {"host, then GPU": [host, gpu], "GPU, then host": [gpu, host]}
    rows: Fields = {}
    for order, devices in orders.items():
        for name, components in COMPONENTS.items():
            row = f"{order}: {name}"
            words = re.findall(r"\w+", row)
            file = context.folder / f"{'-'.join(words)}.json"
            model = pipeline(SIZES[context.size], devices, components)
            with record(model, file) as recording:
                train(model, SIZES[context.size], devices)
            rows[row] = summed_up(recording.steps[1:], components)  # the first step warms up
            context.write({"rows": rows})
    return {"rows": rows}


def pipeline(sizes: Sizes, devices: Sequence[torch.device], components: Sequence[str]) -> GPipe:
    """Return a pipeline of two partitions, one on the host and one on the GPU.

    Args:
        sizes: The sizes of the layers.
        devices: The devices of the first and the second partition.
        components: The components that are on: "dependency", "streams", or both.
    """
    balance = [sizes.on_host if device.type == "cpu" else sizes.on_gpu for device in devices]
    layers = nn.Sequential()
    for _ in range(sum(balance)):
        layers.append(nn.Linear(sizes.width, sizes.width))
    return GPipe(
        layers,
        balance,
        devices=devices,
        chunks=M,
        checkpoint="always",
        engine="graph",
        dependency="dependency" in components,
        copy_streams="streams" in components,
    )


def train(model: GPipe, sizes: Sizes, devices: Sequence[torch.device]) -> None:
    """Run one step more than `sizes.steps`."""
    x: Tensor = torch.rand(M * sizes.samples, sizes.width, device=devices[0])
    for _ in range(1 + sizes.steps):
        model(x).sum().backward()
        model.zero_grad()


def summed_up(steps: Sequence[Timeline], components: Sequence[str]) -> Fields:
    """Return numbers about the recorded steps and their replays. Each is a median over all steps.

    - "seconds": the seconds of a step
    - "replayed": the seconds of the step's replay (its simulation)
    - "one after another": the sum of the seconds of all tasks and copies
    - "copies hidden": the share of the copies' time during which a device computed
    - "recomputed ahead": the share of recomputations on the first device that began before the
      gradient for their backward was computed
    """
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        values["seconds"].append(step.seconds)
        values["replayed"].append(replayed(step, components).seconds)
        values["one after another"].append(sum(event.end - event.start for event in step.events))
        values["copies hidden"].append(hidden(step))
        values["recomputed ahead"].append(ahead(step))
    return {name: median(found) for name, found in values.items()}


def replayed(step: Timeline, components: Sequence[str]) -> Timeline:
    """Simulate a recorded step of two partitions, with the recorded seconds of each task.

    Each copy takes the median of the seconds of all recorded copies.
    """
    tables: dict[Kind, list[list[float]]] = {}
    for kind in ("forward", "recompute", "backward"):
        tables[kind] = [[0.0, 0.0] for _ in range(M)]
    copies = []
    for kind, i, j, start, end in step.events:
        if kind == "copy":
            copies.append(end - start)
        else:
            tables[kind][i][j] = end - start
    costs = Costs(
        tables["forward"],
        tables["backward"],
        tables["recompute"],
        copy=median(copies) if copies else 0.0,
        blocking="streams" not in components,
        ahead="dependency" in components,
    )
    return replay(costs)


def hidden(step: Timeline) -> float:
    """Return the share of the copies' time during which a task ran; without copies, return 0.0."""
    copies = 0.0
    overlapped = 0.0
    busy = _united(step.tasks)
    for event in step.events:
        if event.kind != "copy":
            continue
        copies += event.end - event.start
        for start, end in busy:
            overlapped += max(0.0, min(end, event.end) - max(start, event.start))
    return overlapped / copies if copies else 0.0


def _united(tasks: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the periods of time in which at least one of the tasks ran."""
    periods: list[tuple[float, float]] = []
    for task in sorted(tasks, key=lambda task: task.start):
        if periods and task.start <= periods[-1][1]:
            first, last = periods[-1]
            periods[-1] = first, max(last, task.end)
        else:
            periods.append((task.start, task.end))
    return periods


def ahead(step: Timeline) -> float:
    """Return the share of the first partition's recomputations that began early.

    A recomputation is early if it began before the gradient for its backward was computed. The
    second partition computes this gradient in its backward of the same micro-batch.
    """
    there = {}
    for task in step.tasks:
        if task.kind == "backward" and task.partition == 1:
            there[task.micro_batch] = task.end
    recomputed = early = 0
    for task in step.tasks:
        if task.kind == "recompute" and task.partition == 0:
            recomputed += 1
            early += task.start < there[task.micro_batch]
    return early / recomputed if recomputed else 0.0


def lines(result: Fields) -> list[str]:
    """Return two lines: one for pipelines that begin on the host, and one for those on the GPU.

    For each set of components, a line has the milliseconds of a step, and the other numbers.
    """
    by_order: dict[str, list[str]] = defaultdict(list)
    for row, values in result["rows"].items():
        order, _, components = row.partition(": ")
        by_order[order].append(
            f"{components} {1000 * values['seconds']:.2f} ms (replay "
            f"{1000 * values['replayed']:.2f}, copies hidden {values['copies hidden']:.0%}, "
            f"recomputed ahead {values['recomputed ahead']:.0%})"
        )
    return [f"{order}: {'; '.join(said)}" for order, said in by_order.items()]
