"""Define the classes of an experiment: it has scales, and a scale has rows and memory needs."""

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

# Configurations of rows:
AS_PUBLISHED = "as published"  # rows that repeat published rows, whatever their batch sizes
LIKE_PUBLISHED = "like the published"  # published n and m, with a smaller model and batch
PUBLISHED_BALANCE = "with the published balance"  # published n, m and balance, smaller model
PLANNED = "balance of plan"  # `torchgpipe.plan` finds the balance from a profile
EQUAL_LAYERS = "equal layers"  # all partitions have equally many layers

GiB = 2**30
PUBLISHED_NODE = "p40x8"  # the hardware description of the machine that the papers used
P40_MEMORY = 22 * GiB  # the memory of a Tesla P40 as its driver reports it, rounded down
COMPONENTS: tuple[Component, ...] = ("dependency", "streams", "portals")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of `torch.optim` and its options.

    `state` is the number of values that the optimizer stores for each parameter value.
    """

    name: str
    options: Mapping[str, float | bool]
    state: int


SGD = Optimizer(name="SGD", options={"lr": 0.1, "momentum": 0.0}, state=0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The complete settings of one training run."""

    name: str = ""
    configuration: str = ""
    model: str
    size: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = (3, 224, 224)  # of one sample
    batch_size: int
    partitions: int | None = None  # None: plain training on one device, without a pipeline
    chunks: int | None = None
    checkpoint: Checkpoint | None = None
    balance: tuple[int, ...] | None = None  # None: the balance is profiled before the run
    optimizer: Optimizer = SGD
    # `loss(output, target)` is a mean over samples. If `loss` is a string, it is the name of a
    # function in `torch.nn.functional`.
    loss: "str | Callable[[Any, Any], Tensor]" = "cross_entropy"
    num_classes: int | None = 1000
    options: Mapping[str, Json] = field(default_factory=dict)  # further settings for the record
    components: tuple[Component, ...] = COMPONENTS  # the enabled parts of the pipeline
    deferred_batch_norm: bool = False
    # What rows without a published counterpart have in common. Naive, checkpoint-only and GPipe
    # rows have equal batch or micro-batch sizes. Plain and pipelined rows have the same model.
    equal: Equal | None = None
    steps_per_epoch: int = 0
    skip_epochs: int = 0  # the steps of the first epochs are not timed
    over: str | None = None  # the row of this experiment that is this row's baseline for speed-ups
    published: str | None = None  # the row of the published table that this row reproduces
    # A hardware description, from which an emulation takes the time of copies between devices.
    # Without a description, copies take no time.
    link: str | None = None

    @property
    def group(self) -> str:
        """Return the name of the group that the row belongs to.

        The rows of a group are compared with each other: they run alternately, and share a table.
        """
        if self.equal == "model":
            return self.model
        return self.equal or self.configuration

    @property
    def extra(self) -> bool:
        """Return whether the row runs only with the options --all or --row."""
        return self.configuration == PUBLISHED_BALANCE or self.equal == "micro-batch"

    @property
    def devices(self) -> int:
        """Return the number of devices that the row needs."""
        return self.partitions or 1

    @property
    def micro_batch_size(self) -> int | None:
        """Return the size of the largest micro-batch of `torch.chunk`; None without a pipeline."""
        if self.chunks is None:
            return None
        return math.ceil(self.batch_size / self.chunks)

    @property
    def micro_batches(self) -> int | None:
        """Return how many micro-batches `torch.chunk` makes. There can be fewer than `chunks`."""
        size = self.micro_batch_size
        if size is None:
            return None
        return math.ceil(self.batch_size / size)

    def work(self) -> float:
        """Return a guess of a step's relative cost.

        The cost has no unit, and is only good for estimating the time that is left.
        """
        recomputation = 1.3 if self.checkpoint in ("always", "except_last") else 1
        return self.batch_size * math.prod(self.size) * recomputation

    @property
    def sized(self) -> "SizedModel":
        """Return the row's model with its sizes, which can be built, and can draw mini-batches."""
        from reproduce.models.built import SizedModel

        return SizedModel(self.model, self.size, self.input_shape, self.num_classes)

    @property
    def criterion(self) -> Callable[[Any, Any], "Tensor"]:
        """Return the loss as a function of output and target."""
        from torch.nn import functional

        return getattr(functional, self.loss) if isinstance(self.loss, str) else self.loss

    def config(self) -> dict[str, Json]:
        """Return the row's settings for a record. The keys are names from the published tables."""
        from reproduce.models.built import MODELS

        config: dict[str, Json] = {
            "configuration": self.configuration,
            "equal": self.equal,
            "model": self.model,
        }
        sizes = MODELS[self.model].sizes
        config.update(zip(sizes, self.size, strict=True))
        config.update(self.options)
        config.update(
            input_shape=list(self.input_shape),
            batch_size=self.batch_size,
            chunks=self.chunks,
            micro_batches_effective=self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            partitions=self.partitions,
            balance=None if self.balance is None else list(self.balance),
            checkpoint=self.checkpoint,
        )
        if self.partitions is not None:
            config["components"] = list(self.components)
        config["optimizer"] = self.optimizer.name
        config.update(self.optimizer.options)
        config["loss"] = getattr(self.criterion, "__name__", type(self.loss).__name__)
        if self.num_classes is not None:
            config["num_classes"] = self.num_classes
        if self.skip_epochs:
            config["steps_per_epoch"] = self.steps_per_epoch
            config["skip_epochs"] = self.skip_epochs
        config["dtype"] = "float32"
        config["dataset"] = "fake"
        return config


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One of the sizes in which an experiment runs: its rows, and the machine that they need."""

    name: str
    rows: tuple[Row, ...]
    memory: int  # needed bytes of each CUDA device or, on CPU devices, of main memory
    cuda: bool  # whether the scale runs only on CUDA devices
    steps: int  # the number of timed steps of each row
    warmup: int = 0  # the number of earlier steps that are not timed
    least_steps: int = 5  # the time limit does not apply to this number of first steps
    seconds: float | None = None  # a time limit for all rows together, in seconds

    def settings(self) -> dict[str, Json]:
        """Return the numbers of timed and untimed steps, and the time limit, for a run's record."""
        return {
            "steps": self.steps,
            "warmup": self.warmup,
            "least_steps": self.least_steps,
            "seconds": self.seconds,
        }


# The scales of experiments that time steps, still without rows.
PAPER_SCALE = Scale(
    name="paper", rows=(), memory=P40_MEMORY, cuda=True, steps=20, warmup=2, seconds=1800
)
SMALL_SCALE = Scale(
    name="small", rows=(), memory=4 * GiB, cuda=False, steps=10, warmup=1, least_steps=3
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: what it measures, its scales, and the published table that it reproduces.

    `table` is None if nobody has published such a table.
    """

    name: str
    title: str
    measures: Literal["speed", "memory", "ablation", "accuracy"]
    scales: tuple[Scale, ...]
    table: str | None = None

    def scale(self, name: str) -> Scale:
        """Return the scale called `name`; raise `KeyError` if there is no such scale."""
        scales = {scale.name: scale for scale in self.scales}
        return scales[name]
