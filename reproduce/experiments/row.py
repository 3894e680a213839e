"""Describe experiments as data: rows to run, scales that choose their sizes, experiments that hold both."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from reproduce.models import MODELS
from reproduce.records.places import Json

Checkpoint = Literal["always", "except_last", "never"]
Component = Literal["dependency", "streams", "portals"]
Equal = Literal["batch", "micro-batch", "model"]

AS_PUBLISHED = "as published"  # the configuration of rows that repeat the published ones, whatever their batch sizes
LIKE_PUBLISHED = "like the published"  # of those that repeat them with a smaller model and batch: the same n and m
PUBLISHED_BALANCE = "with the published balance"  # of the same once more, in the balance that suited a P40
PLANNED = "balance of plan"  # of rows in the balance that `torchgpipe.plan` finds by a profile
EQUAL_LAYERS = "equal layers"  # of rows whose partitions have equally many layers
GiB = 2**30
PUBLISHED_NODE = "p40x8"  # the description of what the papers' tables were taken on
P40_MEMORY = 22 * GiB  # a Tesla P40's 24 GB as the driver reports it, rounded down
COMPONENTS: tuple[Component, ...] = ("dependency", "streams", "portals")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Name an optimizer of `torch.optim` and its options; `state` counts the values it keeps per parameter."""

    name: str
    options: Mapping[str, float | bool]
    state: int


SGD = Optimizer(name="SGD", options={"lr": 0.1, "momentum": 0.0}, state=0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Configure one training run, whole.

    `partitions=None` is plain training on one device, without a pipeline. `balance=None` asks for one that is
    profiled on the spot. `published` names the row of the experiment's published table that this one reproduces,
    `over` the row of the same table that the speed-up is taken over. `equal` marks rows of ours that nobody has
    published: naive, checkpoint-only and GPipe at one batch size, or at one micro-batch size; or of one model, plain
    and pipelined. `options` say about the model what its size does not. `components` are the parts of the pipeline
    that are switched on. The steps of the first `skip_epochs` epochs are not timed. `link` names the hardware
    description of which an emulation takes how long copies between devices are; without one, devices share memory and
    copy nothing.
    """

    name: str = ""
    configuration: str = ""
    model: str
    size: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = (3, 224, 224)
    batch_size: int
    partitions: int | None = None
    chunks: int | None = None
    checkpoint: Checkpoint | None = None
    balance: tuple[int, ...] | None = None
    optimizer: Optimizer = SGD
    loss: str = "cross_entropy"
    num_classes: int | None = 1000
    options: Mapping[str, Json] = field(default_factory=dict)
    components: tuple[Component, ...] = COMPONENTS
    deferred_batch_norm: bool = False
    equal: Equal | None = None
    steps_per_epoch: int = 0
    skip_epochs: int = 0
    over: str | None = None
    published: str | None = None
    link: str | None = None

    @property
    def group(self) -> str:
        """Name the rows of its experiment that it is compared with: they are run in turn, and share a table."""
        return self.model if self.equal == "model" else self.equal or self.configuration

    @property
    def extra(self) -> bool:
        """Say whether a run leaves the row out unless it is asked for."""
        return self.configuration == PUBLISHED_BALANCE or self.equal == "micro-batch"

    @property
    def devices(self) -> int:
        """Count the devices that the row needs."""
        return self.partitions or 1

    @property
    def micro_batch_size(self) -> int | None:
        """Give the largest micro-batch's size, as `torch.chunk` splits; None without a pipeline."""
        return None if self.chunks is None else math.ceil(self.batch_size / self.chunks)

    @property
    def micro_batches(self) -> int | None:
        """Count the micro-batches that exist: fewer than `chunks` where the batch does not yield so many."""
        size = self.micro_batch_size
        return None if size is None else math.ceil(self.batch_size / size)

    def work(self) -> float:
        """Guess the cost of a step, to no unit: good for telling the time left, and for nothing else."""
        return self.batch_size * math.prod(self.size) * (1.3 if self.checkpoint in ("always", "except_last") else 1)

    def build(self) -> nn.Sequential:
        """Build the model on PyTorch's default device."""
        classes = {} if self.num_classes is None else {"num_classes": self.num_classes}
        return MODELS[self.model].build(*self.size, **classes)

    def config(self) -> dict[str, Json]:
        """Return the row as a record's `config`, under the names of the published tables."""
        return {
            "configuration": self.configuration,
            "equal": self.equal,
            "model": self.model,
            **dict(zip(MODELS[self.model].sizes, self.size, strict=True)),
            **self.options,
            "input_shape": list(self.input_shape),
            "batch_size": self.batch_size,
            "chunks": self.chunks,
            "micro_batches_effective": self.micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "partitions": self.partitions,
            "balance": None if self.balance is None else list(self.balance),
            "checkpoint": self.checkpoint,
            **({} if self.partitions is None else {"components": list(self.components)}),
            "optimizer": self.optimizer.name,
            **self.optimizer.options,
            "loss": self.loss,
            **({} if self.num_classes is None else {"num_classes": self.num_classes}),
            **({"steps_per_epoch": self.steps_per_epoch, "skip_epochs": self.skip_epochs} if self.skip_epochs else {}),
            "dtype": "float32",
            "dataset": "fake",
        }


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Choose an experiment's sizes, and say what they ask of a machine.

    `steps` are measured per row after `warmup` that are not; where `seconds` is given, a measurement stops
    after that time, but not before `least_steps`. `memory` is what each CUDA device must have, or the main
    memory where the devices are CPU ones, in bytes; `cuda` says whether only CUDA devices will do.
    """

    name: str
    rows: tuple[Row, ...]
    memory: int
    cuda: bool
    steps: int
    warmup: int = 0
    least_steps: int = 5
    seconds: float | None = None

    def settings(self) -> dict[str, Json]:
        """Return how steps are counted, as a run's record keeps it."""
        return {name: getattr(self, name) for name in ("steps", "warmup", "least_steps", "seconds")}


# of experiments that time steps; their rows are filled in
PAPER_SCALE = Scale(name="paper", rows=(), memory=P40_MEMORY, cuda=True, steps=20, warmup=2, seconds=1800)
SMALL_SCALE = Scale(name="small", rows=(), memory=4 * GiB, cuda=False, steps=10, warmup=1, least_steps=3)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Name an experiment: what it measures, the published table that it reproduces, if any, and its scales."""

    name: str
    title: str
    measures: Literal["speed", "memory", "ablation", "accuracy"]
    scales: tuple[Scale, ...]
    table: str | None = None

    def scale(self, name: str) -> Scale:
        """Return the scale called `name`; KeyError where there is none."""
        return {scale.name: scale for scale in self.scales}[name]
