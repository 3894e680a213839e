"""Define an experiment as data: its rows, and scales, each a list of rows and the machine that they need."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from reproduce.records.places import Json

if TYPE_CHECKING:
    from torch import Tensor

    from reproduce.models.built import SizedModel

Checkpoint = Literal["always", "except_last", "never"]
Component = Literal["dependency", "streams", "portals"]
Equal = Literal["batch", "micro-batch", "model"]

AS_PUBLISHED = "as published"  # the configuration of rows that repeat the published ones, whatever their batch sizes
LIKE_PUBLISHED = (
    "like the published"  # the same n and m as published, with a smaller model and batch
)
PUBLISHED_BALANCE = "with the published balance"  # like the published ones, in the balance that was profiled on a P40
PLANNED = "balance of plan"  # of rows whose balance `torchgpipe.plan` finds from a profile
EQUAL_LAYERS = "equal layers"  # of rows whose partitions have equally many layers
GiB = 2**30
PUBLISHED_NODE = "p40x8"  # the hardware description of the node that the papers measured on
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
    """Configure one training run completely.

    `partitions=None` is plain training on one device, without a pipeline. With `balance=None` the balance is profiled
    before the run. `published` names the row of the experiment's published table that this row reproduces, `over` the
    row of this experiment that is the baseline of its speed-up. `equal` marks rows that nobody has published, and says
    what they have in common: "batch" or "micro-batch" size (naive, checkpoint-only and GPipe), or "model" (plain and
    pipelined). `options` are what a record keeps of the model beside its size. `components` are the parts of the
    pipeline that are switched on. The steps of the first `skip_epochs` epochs are not timed. `link` names a hardware
    description: an emulation takes the time of copies between devices from it. Without one, copies take no time.
    `loss(output, target)` is a mean over samples, or the name of such a function of `torch.nn.functional`.
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
    loss: "str | Callable[[Any, Any], Tensor]" = "cross_entropy"
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
        """Name the row's group. The rows of a group are compared: they run in turn, and share a table."""
        return self.model if self.equal == "model" else self.equal or self.configuration

    @property
    def extra(self) -> bool:
        """Say whether the row runs only with --all or --row."""
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
        """Count the micro-batches that `torch.chunk` makes, which may be fewer than `chunks`."""
        size = self.micro_batch_size
        return None if size is None else math.ceil(self.batch_size / size)

    def work(self) -> float:
        """Guess the relative cost of a step. It has no unit and is only good for estimating the time left."""
        return (
            self.batch_size
            * math.prod(self.size)
            * (1.3 if self.checkpoint in ("always", "except_last") else 1)
        )

    @property
    def sized(self) -> "SizedModel":
        """Name the model in the row's sizes, which can build it and draw mini-batches for it."""
        from reproduce.models.built import SizedModel

        return SizedModel(self.model, self.size, self.input_shape, self.num_classes)

    @property
    def criterion(self) -> Callable[[Any, Any], "Tensor"]:
        """Return the loss as a function."""
        from torch.nn import functional

        return getattr(functional, self.loss) if isinstance(self.loss, str) else self.loss

    def config(self) -> dict[str, Json]:
        """Return the row as a record's `config`, under the names of the published tables."""
        from reproduce.models.built import MODELS

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
            "loss": getattr(self.criterion, "__name__", type(self.loss).__name__),
            **({} if self.num_classes is None else {"num_classes": self.num_classes}),
            **(
                {"steps_per_epoch": self.steps_per_epoch, "skip_epochs": self.skip_epochs}
                if self.skip_epochs
                else {}
            ),
            "dtype": "float32",
            "dataset": "fake",
        }


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Choose an experiment's sizes, and say what they ask of a machine.

    Each row runs `warmup` steps that are not timed, then `steps` timed ones. With `seconds`, a measurement stops after
    that time, but not before `least_steps`. `memory`: the bytes that each CUDA device must have or, on CPU devices, the
    main memory. With `cuda`, the scale runs on CUDA devices only.
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


# of experiments that time steps, without their rows
PAPER_SCALE = Scale(
    name="paper", rows=(), memory=P40_MEMORY, cuda=True, steps=20, warmup=2, seconds=1800
)
SMALL_SCALE = Scale(
    name="small", rows=(), memory=4 * GiB, cuda=False, steps=10, warmup=1, least_steps=3
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Define an experiment: what it measures, its scales, and the published table that it reproduces, if any."""

    name: str
    title: str
    measures: Literal["speed", "memory", "ablation", "accuracy"]
    scales: tuple[Scale, ...]
    table: str | None = None

    def scale(self, name: str) -> Scale:
        """Return the scale called `name`; KeyError where there is none."""
        return {scale.name: scale for scale in self.scales}[name]
