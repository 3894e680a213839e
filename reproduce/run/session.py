"""Hold one experiment that is being run, and what all ways of running share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from reproduce.experiments import Experiment, Row, Scale
from reproduce.machine.devices import MOST_DEVICES, Devices
from reproduce.records.places import Json
from reproduce.records.record import Engine, Result
from reproduce.run.accuracy.datasets import AccuracyNeeds
from reproduce.run.emulation import Link, own_links
from reproduce.run.engines.engines import why_not
from reproduce.run.failure import Failure
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.replay import Timeline

UNITS = {
    "step_time": "s; of an emulated row replayed over the times of its tasks",
    "here_time": "s of the emulated step on devices like this machine's, where step_time is of ones behind a link",
    "work_time": "s that running the tasks of an emulated step took: on a CPU its thread's CPU time",
    "wall_time": "s that running the tasks of an emulated step took on the clock",
    "executed": "micro-batches of an emulated step that were run; the rest take as long as these",
    "loss": "1",
    "round": "number of the round, from 0; steps of one round ran next to each other",
    "parameters": "count",
    "model_bytes": "bytes",
    "peak_allocated": "bytes, of each device",
    "peak_reserved": "bytes, of each device",
    "memory_problem": "why there is no memory",
    "utilization": "share of the time that each device was busy, from 0 to 1",
    "utilization_problem": "why there is no utilization",
    "bubble": "share of the devices' time, from the first task to the last, in which they waited, from 0 to 1",
    "seed": "seed that the training of the epoch started from",
    "epoch": "number of the epoch, from 1; series of one row belong together, value by value",
    "top1_error": "%, after the epoch",
    "train_loss": "1, mean over the epoch",
    "epoch_time": "s, of training alone, reading data included",
    "learning_rate": "1, of the epoch's last step",
    "samples_per_epoch": "count",
}


@dataclass(kw_only=True)
class Session:
    """Run `experiment` at `scale`: every row ends in a result of `recorder`, and `progress` shows each step.

    `steps` replaces the number of timed steps, and the time limit, of speed experiments. Rows of up to `emulate`
    devices are emulated, with copies as on `hardware` where it is given. Measured rows run by each of `engines`.
    `rounds` counts the rounds that were run.
    `check` is called between steps, and raises where the run is to end. `trace` is given experiment, row and timeline
    of a step of every speed row. Experiments on accuracy need `accuracy`.
    """

    experiment: Experiment
    scale: Scale
    devices: Devices
    recorder: Recorder
    progress: Progress
    balancer: Balancer
    seed: int
    steps: int | None = None
    emulate: int = MOST_DEVICES
    hardware: Hardware | None = None
    engines: Sequence[Engine] = ("threads",)
    rounds: int = 0
    check: Callable[[], None] = lambda: None
    trace: Callable[[str, str, Timeline], None] | None = None
    accuracy: AccuracyNeeds | None = None
    links: dict[str, Link] = field(default_factory=dict)
    reasons: dict[tuple[str, Engine], str | None] = field(default_factory=dict)

    def expected(self) -> Sequence[Row]:
        """Return all rows, none of which was run yet: where no clock is involved, a device may play several."""
        for row in self.scale.rows:
            self.put(row, status="not run")
        return self.scale.rows

    def lacks(self, row: Row) -> dict[str, Any]:
        """Return what to record of a row for which there are too few devices."""
        return {"status": "needs devices", "reason": f"needs {row.devices} devices"}

    def emulates(self, row: Row) -> bool:
        """Say whether the row is to be emulated."""
        return row.devices <= self.emulate

    def why_not(self, row: Row, engine: Engine) -> str | None:
        """Return why the engine cannot run the row, in words; None where it can."""
        if (row.name, engine) not in self.reasons:
            self.reasons[row.name, engine] = why_not(engine, row, self.devices)
        return self.reasons[row.name, engine]

    def link(self, row: Row) -> Link | None:
        """Return what says how long the row's copies take in an emulation; None where they take no time.

        It is what was asked for, or what is known of GPUs like those here, or what the row names.
        """
        own = own_links(self.devices)
        name = self.hardware.name if self.hardware is not None else own or row.link
        if row.devices == 1 or name is None:
            return None
        if name not in self.links:
            papers = {paper.name: paper for paper in self.experiment.scale("paper").rows}
            in_proportion = self.scale.name != "paper" and name != own
            self.links[name] = Link(self.hardware or load_hardware(name), papers if in_proportion else None)
        return self.links[name]

    def job(self, row: Row) -> str:
        """Name the row's steps to the progress display."""
        return f"{self.experiment.name} {row.name}"

    def start(self, text: str, job: str = "") -> None:
        """Show that something starts: a step, where a job is named."""
        self.check()
        self.progress.start(job, f"{self.experiment.name}: {text}")

    def build(self, row: Row, data: FakeData) -> Training:
        """Make the row ready to train."""
        self.start(f"building {row.name}")
        return Training(row, self.devices, data, self.balancer, self.seed)

    def result(self, row: Row, *, emulated: bool = False, engine: Engine = "threads") -> Result:
        """Return an empty result for `row`."""
        return Result(
            experiment=self.experiment.name,
            row=row.name,
            status="emulated" if emulated else "measured",
            emulated=emulated,
            engine=engine,
            scale=self.scale.name,
            device=self.devices.kind,
            config=row.config(),
            over=row.over,
            published=None if row.published is None else f"{self.experiment.table}/{row.published}",
        )

    def put(self, row: Row, *, emulated: bool = False, engine: Engine = "threads", **changes: Any) -> None:
        """Record the row's result with these fields, and write the record."""
        self.recorder.put(replace(self.result(row, emulated=emulated, engine=engine), **changes))
        self.recorder.save()

    def put_failure(self, row: Row, failure: Failure) -> None:
        """Record how a row ended that did not succeed."""
        self.put(row, status=failure.status, reason=failure.reason)
        self.progress.drop(self.job(row))

    def recorded(self, row: Row, *, emulated: bool = False, engine: Engine = "threads") -> Result:
        """Return what is recorded of the row: that it was not run, where nothing is."""
        empty = self.result(row, emulated=emulated, engine=engine)
        return self.recorder.results.get(empty.key, replace(empty, status="not run"))

    def add_values(
        self, row: Row, values: dict[str, Json], *, emulated: bool = False, engine: Engine = "threads"
    ) -> None:
        """Add values to a row's result, and write the record."""
        result = self.recorded(row, emulated=emulated, engine=engine)
        self.recorder.put(replace(result, values={**result.values, **values}))
        self.recorder.save()

    def free(self) -> None:
        """Give back the memory of what is no longer used."""
        gc.collect()
        if self.devices.kind == "cuda":
            torch.cuda.empty_cache()
