"""Measure the memory of each device in the papers' experiments on memory, one device at a time.

Each partition runs alone on the GPU, with zeros in place of what other partitions would send (see
`alone.py`). So one GPU is enough for a table of eight devices. Each partition runs one training
step. The optimizer's state is allocated before that step, so the step takes as much memory as the
second step of a training.

In a dry run on a CPU, the bytes of all live tensors are counted, because PyTorch's allocator for
CPUs does not count bytes.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from msgspec import structs

from benchmarks.gpu.alone import Partitions
from benchmarks.gpu.part import Context, Fields
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Experiment, Row
from reproduce.models.counted import counted, setup_of
from reproduce.numbers.metrics import read
from reproduce.numbers.sources import Entry
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from reproduce.run.engines.failure import explain
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from reproduce.run.peak import model_values
from reproduce.run.recorder import closed
from reproduce.run.session import UNITS
from reproduce.tables.layout import GiB
from torchgpipe.plan.predict.memory import setup_memory

PURPOSE = "how much memory each device of the papers' memory tables takes, each partition alone"
SHARE = 3
NEEDS: list[str] = []

TABLES = ("amoebanet-memory", "unet-memory")
NAMES = ("parameters", "model_bytes", "peak_allocated", "peak_reserved")
LEAST = 5.0
"""Seconds that a partition needs at least."""
TINY: dict[str, Any] = {
    "size": (1, 2),
    "input_shape": (3, 64, 64),
    "batch_size": 4,
    "chunks": 4,
    "balance": (30, 35),
}
"""The changes of U-Net's row `pipeline-2` for a dry run."""


def run(context: Context) -> Fields:
    """Measure the memory of one row (configuration) after another; save the record after each."""
    device = context.devices[0]
    record = _empty_record(context)
    rows: Fields = {}
    every = list(rows_of(context.size))
    for experiment, row in every:
        if context.seconds_left() < LEAST:
            break
        found = _Measured(experiment, row)
        rows[f"{experiment.name}/{row.name}"] = found.fields
        for _ in found.measure(context, device):
            context.write({"planned": len(every), "rows": rows})
        if found.is_complete:
            record.results.append(found.result(device, record.scale))
            # Each row in the record is finished, so the run counts as finished after each row.
            context.save(closed(record, "finished"))
    return {"planned": len(every), "rows": rows}


def rows_of(size: str) -> Iterator[tuple[Experiment, Row]]:
    """Yield the rows of the papers' memory tables or, for a dry run, one row with a small model."""
    for name in TABLES:
        experiment = EXPERIMENTS[name]
        for row in experiment.scale("paper").rows:
            if size == "paper":
                yield experiment, row
            elif row.name == "pipeline-2" and row.model == "U-Net":
                yield experiment, replace(row, **TINY)


class _Measured:
    """The results so far of a row (a configuration of a memory table).

    Attributes:
        fields: The row's numbers: predicted, allocated and reserved bytes of each device, the
            published bytes of all devices together, and the indices of the devices whose partition
            does not fit.
    """

    def __init__(self, experiment: Experiment, row: Row) -> None:
        self.experiment = experiment
        self.row = row
        counts = counted(row.sized)
        predicted = setup_memory(counts, setup_of(row.config(), len(counts)))
        self.fields: Fields = {
            "predicted": [round(each.peak) for each in predicted],
            "allocated": [],
            "reserved": [],
            "published": _published(experiment, row),
            "does_not_fit": [],
        }

    @property
    def is_complete(self) -> bool:
        """Whether all devices of the row were tried."""
        return len(self.fields["allocated"]) == self.row.devices

    def measure(self, context: Context, device: torch.device) -> Iterator[None]:
        """Measure the memory of one partition after another on `device`.

        Yield after each partition, so that the caller can save what was measured.
        """
        partitions = Partitions(self.row)
        for j in range(self.row.devices):
            if context.seconds_left() < LEAST:
                return
            allocated = reserved = None
            try:
                allocated, reserved = peaks(partitions, j, device)
            except Exception as error:
                if explain(error).status != "out of memory":
                    raise
                self.fields["does_not_fit"].append(j)
            partitions.release(j)
            self.fields["allocated"].append(allocated)
            self.fields["reserved"].append(reserved)
            yield

    def result(self, device: torch.device, scale: str | None) -> Result:
        """Return the row's result for the record.

        At the scale "paper", the result names the published row that it reproduces.
        """
        row = self.row
        table = self.experiment.table if scale == "paper" else None
        fields = self.fields
        result = Result(
            experiment=self.experiment.name,
            row=row.name,
            status="measured",
            scale=scale,
            device=device.type,
            config={**row.config(), "apart": True},
            published=table and row.published and f"{table}/{row.published}",
        )
        if fields["does_not_fit"]:
            reason = "; ".join(_needs(fields, j) for j in fields["does_not_fit"])
            return structs.replace(result, status="out of memory", reason=reason)
        values = {**model_values(row), "peak_allocated": fields["allocated"]}
        if None not in fields["reserved"]:
            values["peak_reserved"] = fields["reserved"]
        return structs.replace(result, values=values)


def _needs(fields: Fields, j: int) -> str:
    return f"device {j} needs about {fields['predicted'][j] / GiB:.1f} GiB, as predicted"


def _published(experiment: Experiment, row: Row) -> float | None:
    """Return how many bytes were reserved on all devices in the paper, or `None` if unknown."""
    table = published(str(experiment.table))
    for paper in table.results:
        if paper.row == row.published:
            reading = read(Entry(table, paper), "reserved")
            return None if reading is None else reading.middle
    return None


def _empty_record(context: Context) -> Record:
    """Return a record for the results, which says that the run uses only one device."""
    title = "memory of the papers' tables, each partition alone"
    record = context.new_record(title, {name: UNITS[name] for name in NAMES}, [])
    assert record.run is not None
    run = structs.replace(record.run, devices=1)
    return structs.replace(record, run=run)


def peaks(partitions: Partitions, j: int, device: torch.device) -> tuple[int, int | None]:
    """Run a step of partition `j` alone on a device, and return the peaks of its memory.

    Returns:
        The largest number of bytes that tensors took at the same time, and the largest number of
        bytes that the allocator reserved. On a CPU, the second number is `None`.
    """
    if device.type == "cpu":
        return _counted_peak(partitions, j, device), None
    gc.collect()
    torch.accelerator.empty_cache()
    alone = partitions.prepared(j, device)
    alone.make_optimizer_state()
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    alone.step()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(
        device
    )


def _counted_peak(partitions: Partitions, j: int, device: torch.device) -> int:
    """Run a step of partition `j`; return the peak of the bytes that its live tensors take."""
    counter = LiveBytes(1)
    with LiveBytesMode(counter, 0):
        alone = partitions.prepared(j, device)
        alone.make_optimizer_state()
        counter.peak = [*counter.live]
        alone.step()
    return counter.peak[0]


def lines(result: Fields) -> list[str]:
    """Return a line about the last complete row of each table, and a line about predictions."""
    said: dict[str, str] = {}
    shares = []
    lacking = []
    for name, row in result["rows"].items():
        experiment, _, row_name = name.partition("/")
        allocated = row["allocated"]
        for peak, predicted in zip(allocated, row["predicted"], strict=False):
            if peak is not None:
                shares.append(peak / predicted)
        lacking += [f"{name}: {_needs(row, j)}" for j in row["does_not_fit"]]
        if len(allocated) == len(row["predicted"]) and not row["does_not_fit"]:
            said[experiment] = f"{experiment}, {row_name}: {_about(row)}"
    found = [*said.values()]
    if shares:
        found.append(
            f"{len(result['rows'])} of {result['planned']} rows, {len(shares)} partitions: "
            f"allocated over predicted {median(shares):.2f}, from {min(shares):.2f} to "
            f"{max(shares):.2f}; {'; '.join(lacking) or 'all fit'}"
        )
    return found


def _about(row: Fields) -> str:
    """Say how much memory all devices of a row take together, as measured and as predicted."""
    total = sum(row["allocated"]) / GiB
    predicted = sum(row["predicted"]) / GiB
    text = f"{total:.2f} GiB allocated, predicted {predicted:.2f}"
    if None not in row["reserved"]:
        text += f"; {sum(row['reserved']) / GiB:.2f} GiB reserved"
    else:
        text += "; reserved: not measured on a CPU"
    if row["published"]:
        text += f", published {row['published'] / GiB:.2f}"
    return text
