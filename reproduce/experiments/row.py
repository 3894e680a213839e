"""Define the classes `Experiment`, `Scale` and `Row`.

An experiment has scales, such as `paper` and `small`. A scale has rows, and says what hardware the
rows need. A row is the settings of one training run.
"""

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

AS_PUBLISHED = "as published"
"""The configuration of rows that repeat published rows exactly."""
LIKE_PUBLISHED = "like the published"
"""The configuration of rows with the published n and m, but a smaller model and batch."""
PUBLISHED_BALANCE = "with the published balance"
"""The configuration of rows with the published n, m and balance, but a smaller model and batch."""
PLANNED = "balance of plan"
"""The configuration of rows whose balance `torchgpipe.plan` finds from a profile."""
EQUAL_LAYERS = "equal layers"
"""The configuration of rows whose partitions all have the same number of layers."""
CHANGED = "changed"
"""The configuration, and the group, of rows that the option `--set` changed."""

PUBLISHED_NODE = "p40x8"  # the hardware description of the machine that the papers used
GiB = 2**30
P40_MEMORY = 22 * GiB  # the memory of a Tesla P40 as its driver reports it, rounded down
COMPONENTS: tuple[Component, ...] = ("dependency", "streams", "portals")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of `torch.optim` and its options.

    `state` is the number of values that the optimizer stores for each element of a parameter.
    """

    name: str
    options: Mapping[str, float | bool]
    state: int


SGD = Optimizer(name="SGD", options={"lr": 0.1, "momentum": 0.0}, state=0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The complete settings of one training run.

    Attributes:
        input_shape: The shape of one sample.
        partitions: The number of partitions. None means plain training without a pipeline.
        balance: The number of layers of each partition. None means that it is profiled before the
            run.
        loss: A function `loss(output, target)` that returns a mean over samples, or the name of
            such a function in `torch.nn.functional`.
        options: Further settings that are only written into the record.
        components: The components of the pipeline that are enabled. The ablation disables some.
        equal: What the row has in common with the rows that it is compared with: the batch size,
            the micro-batch size, or the model. None for rows that reproduce published rows.
        skip_epochs: The number of first epochs whose steps are not timed.
        over: The name of the row in the same experiment that is the baseline of this row's
            speed-up.
        published: The name of the row in the published table that this row reproduces.
        link: The hardware description from which an emulation takes the time of copies between
            devices. None means that copies take no time.
        changed_from: If the option `--set` changed the row, the name of the row as it was.
        changed: Maps the names that `--set` has for the changed settings to their new values.
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
    changed_from: str | None = None
    changed: Mapping[str, Json] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """Return the name of the group of rows that the row belongs to.

        The rows of a group are compared with each other: they run alternately, and share a table.
        """
        if self.changed_from is not None:
            return CHANGED
        if self.equal == "model":
            return self.model
        return self.equal or self.configuration

    @property
    def extra(self) -> bool:
        """Return whether the row runs only if the user gives the option --all or --row."""
        return self.configuration == PUBLISHED_BALANCE or self.equal == "micro-batch"

    @property
    def devices(self) -> int:
        """Return the number of devices that this training run needs."""
        return self.partitions or 1

    @property
    def micro_batch_size(self) -> int | None:
        """Return the number of samples in the largest micro-batch; None without a pipeline."""
        if self.chunks is None:
            return None
        return math.ceil(self.batch_size / self.chunks)

    @property
    def micro_batches(self) -> int | None:
        """Return how many micro-batches `torch.chunk` makes, which can be fewer than `chunks`."""
        size = self.micro_batch_size
        if size is None:
            return None
        return math.ceil(self.batch_size / size)

    def work(self) -> float:
        """Return a number that is roughly proportional to the time of a step of this row.

        The number has no unit, and can only be compared with that of another row. A run uses it to
        divide the time limit among groups of rows, and to predict how much time is left.
        """
        recomputation = 1.3 if self.checkpoint in ("always", "except_last") else 1
        return self.batch_size * math.prod(self.size) * recomputation

    @property
    def sized(self) -> "SizedModel":
        """Return an object that builds the model of this training run, and draws mini-batches."""
        from reproduce.models.built import SizedModel

        return SizedModel(self.model, self.size, self.input_shape, self.num_classes)

    @property
    def criterion(self) -> Callable[[Any, Any], "Tensor"]:
        """Return the loss as a function of output and target."""
        from torch.nn import functional

        return getattr(functional, self.loss) if isinstance(self.loss, str) else self.loss

    def config(self) -> dict[str, Json]:
        """Return all settings of this training run, for a record (a file of results).

        The keys are names from the published tables.
        """
        from reproduce.models.built import MODELS

        config: dict[str, Json] = {
            "configuration": self.configuration,
            "equal": self.equal,
            "group": self.group,
            "model": self.model,
        }
        if self.changed_from is not None:
            config["changed_from"] = self.changed_from
            config["changed"] = dict(self.changed)
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
    """A named set of sizes for an experiment: its rows, and the hardware that the rows need.

    Attributes:
        memory: The needed bytes of each CUDA device or, on CPU devices, of main memory.
        cuda: Whether the scale runs only on CUDA devices.
        steps: The number of timed steps of each row.
        warmup: The number of steps before the timed steps.
        least_steps: The number of steps that are timed even if the time limit is over. With the
            default of 5, a difference between the steps of two runs can be significant.
        seconds: A time limit for all rows together.
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
        """Return the numbers of steps and the time limit, for the run's file of results."""
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
SMALL_SCALE = Scale(name="small", rows=(), memory=4 * GiB, cuda=False, steps=10, warmup=1)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: what it measures, and its scales (the sizes in which it can run).

    `table` is the id of the published table that the experiment reproduces, or None if nobody has
    published such a table.
    """

    name: str
    title: str
    measures: Literal["speed", "memory", "ablation", "accuracy"]
    scales: tuple[Scale, ...]
    table: str | None = None

    def scale(self, name: str) -> Scale:
        """Return the scale (set of sizes) called `name`; raise `KeyError` if there is none."""
        scales = {scale.name: scale for scale in self.scales}
        return scales[name]
