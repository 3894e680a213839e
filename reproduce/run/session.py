"""Define `Session`: a running experiment, with the options and helpers that it needs."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.datasets import AccuracyNeeds
from reproduce.experiments.row import Experiment, Row, Scale
from reproduce.machine.devices import MOST_DEVICES, Devices
from reproduce.machine.load import Load, other_runs
from reproduce.predict.link import Link, own_links
from reproduce.records.places import Json
from reproduce.records.record import Engine, Result
from reproduce.run.estimate import StepTimes
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder
from reproduce.run.training import Balancer
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.predict.replay import Timeline

UNITS = {
    "step_time": "s; of an emulated row replayed over the times of its tasks",
    "here_time": "s of the emulated step on devices like this machine's, "
    "where step_time is of ones behind a link",
    "work_time": "s that running the tasks of an emulated step took: "
    "on a CPU its thread's CPU time",
    "task_time": "s that the GPU took for each task of an emulated step: by kind of task, for each "
    "micro-batch that was run, a list with a number for each partition",
    "issue_time": "s that the host took to issue each task of an emulated step, the GPU idle: "
    "lists as of task_time",
    "one_thread_time": "s of the emulated step if one thread of the host issues the tasks of all "
    "devices",
    "executed": "micro-batches of an emulated step that were run; the rest take as long as these",
    "loss": "1",
    "round": "number of the round, from 0; steps of one round ran next to each other",
    "others": "share of the cores that other programs had in the step's round, from 0 to 1",
    "stolen": "share of the cores that other virtual machines had in the step's round, from 0 to 1",
    "pressure": "share of the round in which any program, also this one, waited for a core, "
    "from 0 to 1",
    "clock": "MHz of the multiprocessors at the end of the step's round, of the slowest device",
    "memory_clock": "MHz of the memory at the end of the step's round, of the slowest device",
    "slowed": "NVML's bits for what lowered a clock at the end of the step's round: 1 idle, "
    "4 power limit, 8 hardware, 32 and 64 temperature, 128 power supply",
    "disturbed_rounds": "count, of rounds that are left out",
    "parameters": "count",
    "model_bytes": "bytes",
    "peak_allocated": "bytes, of each device",
    "peak_reserved": "bytes, of each device",
    "memory_problem": "why there is no memory",
    "utilization": "share of the time that each device was busy, from 0 to 1",
    "utilization_problem": "why there is no utilization",
    "bubble": "share of the devices' time, from the first task to the last, in which they waited, "
    "from 0 to 1",
    "seed": "seed that the training of the epoch started from",
    "epoch": "number of the epoch, from 1; series of one row belong together, value by value",
    "top1_error": "%, after the epoch",
    "train_loss": "1, mean over the epoch",
    "epoch_time": "s, of training alone, reading data included",
    "learning_rate": "1, of the epoch's last step",
    "samples_per_epoch": "count",
}
GroupDone = tuple[str, bool]  # a group's name, and whether the whole group is finished


@dataclass(kw_only=True)
class Session:
    """An experiment that is running, with all options and helpers of the run.

    For every row (configuration) of the experiment, a result is added to `recorder`, even if the
    row fails.

    Attributes:
        progress: The display that shows each step.
        times: Estimates how long steps take.
        steps: How many steps of each row are timed. If None, the scale decides the number.
        emulate: Rows that need at most this number of devices are emulated.
        hardware: The hardware that determines how long copies between emulated devices take.
        engines: A row is measured with each of these engines, which run its partitions in parallel.
        rounds: The number of rounds so far. In a round, each row of a group runs a step.
        check: A function that is called before each step. It raises an error to stop the run.
        trace: A function that is called with the name of an experiment, the name of a row, and the
            timeline of a step.
        accuracy: The data and the seeds of an accuracy experiment.
        links: Maps the name of a hardware description to the links between emulated devices.
        load: Measures how busy other programs are.
    """

    experiment: Experiment
    scale: Scale
    devices: Devices
    recorder: Recorder
    progress: Progress
    balancer: Balancer
    times: StepTimes
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
    load: Load = field(default_factory=Load)

    def link(self, row: Row) -> Link | None:
        """Return the link that says how long copies between devices take when `row` is emulated.

        The link is made from the first of these hardware descriptions that exists:

        1. the description that the user chose;
        2. the description of GPUs like those of this machine;
        3. the description that the row names.

        If none exists, or if the row needs only one device, return None. Then copies take no time.
        """
        own = own_links(self.devices)
        name = self.hardware.name if self.hardware is not None else own or row.link
        if row.devices == 1 or name is None:
            return None
        if name not in self.links:
            hardware = self.hardware or load_hardware(name)
            papers = None
            if self.scale.name != "paper" and name != own:
                # `self.experiment` may have only the rows that the user has chosen.
                papers = {}
                whole = EXPERIMENTS.get(self.experiment.name, self.experiment)
                for scale in whole.scales:
                    if scale.name == "paper":
                        papers = {paper.name: paper for paper in scale.rows}
            self.links[name] = Link(hardware, papers)
        return self.links[name]

    def job(self, name: object) -> str:
        """Return the name of a row or group in the progress display.

        This is the name of the experiment, followed by `name`.
        """
        return f"{self.experiment.name} {name}"

    def guess(self, row: Row, work: float, **how: Any) -> float | None:
        """Estimate how many seconds a step of the row takes; return None if nothing is known.

        Args:
            row: The row (configuration).
            work: The estimated cost of the step, in the unit of `Row.work`.
            how: Fields of `Result` that say how the row will run: `emulated` and `engine`.
        """
        return self.times.guess(self.result(row, **how), row, work)

    def start(self, text: str, job: str = "", *, typical: bool = True) -> None:
        """Tell the progress display what starts now.

        Args:
            text: What the display says.
            job: The name of a job (all steps of a row), if a step of this job starts.
            typical: Whether further steps of the job will take about as long. Building a model, for
                example, is not typical.
        """
        self.check()
        self.progress.start(job, text, typical=typical)

    def finish(self, name: object, steps: int | None = None) -> None:
        """Tell the progress display that a row or group will not run all of its planned steps.

        Lower the number of its further steps by `steps`. If `steps` is None, no further step will
        run.
        """
        self.progress.finish(self.job(name), steps)

    def result(self, row: Row, **fields: Any) -> Result:
        """Make a `Result` for `row`. `fields` are the values of further fields of the result.

        Without `fields`, the result says that the row was measured with the engine `threads`.
        """
        found = Result(
            experiment=self.experiment.name,
            row=row.name,
            status="emulated" if fields.get("emulated") else "measured",
            scale=self.scale.name,
            device=self.devices.kind,
            config=row.config(),
            over=row.over,
            published=row.published and f"{self.experiment.table}/{row.published}",
        )
        return replace(found, **fields)

    def put(self, row: Row, **fields: Any) -> None:
        """Add a result of the row to the record, and write the record to its file.

        `fields` are fields of `Result`, such as `samples`.
        """
        self.recorder.put(self.result(row, **fields))
        self.recorder.save()

    def plan(self, row: Row, **how: Any) -> None:
        """Add a row that will run to the record, but do not write the record to its file.

        `how` are the fields `emulated` and `engine` of `Result`, which say how the row will run. If
        the row has a result already, the result is dropped.
        """
        self.recorder.plan(self.result(row, **how))

    def found(self, row: Row, **how: Any) -> Result | None:
        """Return the row's result in the record, or None if the row has no result yet.

        `how` are the fields `emulated` and `engine` of `Result`, which say how the row ran.
        """
        return self.recorder.found(self.result(row, **how).key)

    def add_values(self, row: Row, values: dict[str, Json], **how: Any) -> None:
        """Add values to the row's result in the record, and write the record to its file.

        `how` are the fields `emulated` and `engine` of `Result`, which say how the row ran.
        """
        result = self.recorder.results[self.result(row, **how).key]
        together = {**result.values, **values}
        self.recorder.put(replace(result, values=together))
        self.recorder.save()

    def tell_others(self) -> None:
        """Tell the user which other runs of this program use this machine. Name each run once."""
        told = self.load.told
        for pid, command in other_runs().items():
            if command not in told:  # all processes of a run have the same command
                self.progress.say(
                    f"process {pid} runs here, too, and both disturb each other: "
                    f"python -m {command[:99]}"
                )
            told.add(command)

    def free(self) -> None:
        """Free the memory of unused objects, and what PyTorch's allocator caches on the GPUs."""
        gc.collect()
        if self.devices.kind == "cuda":
            torch.accelerator.empty_cache()
