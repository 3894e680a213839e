"""Prepare a row (configuration) for training: its model on its devices, and its mini-batch."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from reproduce.experiments.row import EQUAL_LAYERS, PLANNED, Row
from reproduce.machine.devices import MOST_DEVICES, Devices
from reproduce.models.built import MODELS, changed
from reproduce.run.engines.engines import Work
from torchgpipe import GPipe
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.balance.profile import profile_times
from torchgpipe.gpipe import EngineName
from torchgpipe.plan import plan
from torchgpipe.tensors.observe import Observer, Task, observed
from torchgpipe.timeline.stopwatch import Stopwatch
from torchgpipe.trace.sequential import flat

PROFILE_SECONDS = 1.0
"""For how many seconds the layers of a model are profiled."""
PROFILE_SAMPLES = 16
"""The largest number of samples in a profile, which is enough to compare layers."""
NO_LIMIT = 2.0**60
"""Bytes of memory: practically no limit. Rows that do not fit in memory fail when they run."""
Balance = tuple[int, ...]
T = TypeVar("T")


class FakeData:
    """Random mini-batches that are drawn only once, and that all rows (configurations) share.

    The number of drawn samples is the largest batch size of all rows. A row with a smaller batch
    size gets the first of these samples, as views of the same tensors.
    """

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self.rows = rows
        self.seed = seed
        # The inputs and the targets of each kind of data.
        self.drawn: dict[Hashable, tuple[Any, Any]] = {}
        # Copies of the inputs (part 0) or targets (part 1), by part, kind of data and device.
        self.moved: dict[Hashable, Any] = {}

    def part(self, part: int, row: Row, device: torch.device) -> Any:
        """Return the input (`part` 0) or target (`part` 1) of a row (configuration) on a device."""
        kind = _kind_of_data(row)
        if kind not in self.drawn:
            self.drawn[kind] = self._draw(row)
        key = (part, kind, device)
        if key not in self.moved:
            whole = self.drawn[kind][part]
            self.moved[key] = changed(lambda x: x.to(device), whole)
        return changed(lambda x: x[: row.batch_size], self.moved[key])

    def _draw(self, row: Row) -> tuple[Any, Any]:
        """Draw inputs and targets for all rows that train on the same kind of data as `row`.

        The number of samples is the largest batch size of these rows.
        """
        kind = _kind_of_data(row)
        batch_sizes = [each.batch_size for each in self.rows if _kind_of_data(each) == kind]
        return row.sized.batch(max(batch_sizes), self.seed)

    input, target = partialmethod(part, 0), partialmethod(part, 1)


def _kind_of_data(row: Row) -> Hashable:
    """Return a key that is equal for all rows whose models can train on the same samples."""
    return MODELS[row.model].sample, row.input_shape, row.num_classes


class Balancer:
    """Finds a balance for each row, which is the number of layers of each partition.

    - Rows with the configuration `EQUAL_LAYERS` get equally many layers in each partition.
    - Rows with the configuration `PLANNED` get the balance that `torchgpipe.plan` finds.
    - For other rows, the layers of the model are profiled. These rows get the balance whose slowest
      partition takes the least time. A profile is reused for further rows with the same model and
      number of samples.
    """

    def __init__(self, devices: Devices) -> None:
        (self.device,) = devices.first(1)
        # Maps a model and a number of samples to the seconds of each layer.
        self.profiles: dict[Hashable, list[float]] = {}
        # Maps a model, a number of samples and the most partitions to balances, which are mapped
        # from their numbers of partitions.
        self.plans: dict[Hashable, dict[int, Balance]] = {}

    def balanced(self, row: Row, model: nn.Sequential, data: FakeData) -> Row:
        """Return the row with a balance (the number of layers of each partition).

        A row that already has a balance, or that has no pipeline, does not change.
        """
        if row.partitions is None or row.balance is not None:
            return row
        if row.partitions == 1:
            return replace(row, balance=(len(model),))
        if row.configuration == EQUAL_LAYERS:
            return replace(row, balance=_equal_layers(len(model), row.partitions))

        samples = _profiled_samples(row)
        sample = changed(lambda x: x[:samples], data.input(row, self.device))
        key = (row.sized, samples)
        if row.configuration == PLANNED:
            most = max(MOST_DEVICES, row.partitions)
            plans = self.plans.get((key, most))
            if plans is None:
                plans = self.plans[key, most] = planned_balances(row, model, sample, most)
            return replace(row, balance=plans[row.partitions])
        if key not in self.profiles:
            inputs = flat(model, sample)
            self.profiles[key] = profile_times(model, inputs, PROFILE_SECONDS, self.device)
        balance = minimise_heaviest(self.profiles[key], row.partitions)
        return replace(row, balance=tuple(balance))


def _equal_layers(layers: int, partitions: int) -> Balance:
    """Return a balance with equally many layers in each partition, or nearly so.

    If the layers cannot be divided equally, the first partitions have one more layer.
    """
    each, more = divmod(layers, partitions)
    larger = [each + 1] * more
    smaller = [each] * (partitions - more)
    return (*larger, *smaller)


def _profiled_samples(row: Row) -> int:
    """Return the number of samples in the mini-batch with which a row's layers are profiled."""
    samples = row.micro_batch_size or 1
    if row.equal == "batch":
        # Rows that are compared at equal batch size have different micro-batch sizes, but share one
        # profile. So the model is profiled with a quarter of the batch. This size is between the
        # largest and the smallest micro-batch size.
        samples = math.ceil(row.batch_size / 4)
    return min(samples, PROFILE_SAMPLES, row.batch_size)


def planned_balances(
    row: Row, model: nn.Sequential, sample: Any, devices: int
) -> dict[int, Balance]:
    """Return a dictionary of the balance that `torchgpipe.plan` finds for each partition count.

    The plan is made from a profile of the model on the device of `sample`, a mini-batch. It has
    balances for up to `devices` partitions.
    """
    found = plan(
        model,
        sample,
        batch_size=row.batch_size,
        devices=devices,
        memory=NO_LIMIT,
        chunks=row.micro_batches,
        checkpoint=row.checkpoint or "never",
    )
    balances = {}
    for partitions, each in found.by_devices.items():
        if each.best is not None:
            balances[partitions] = tuple(each.best.setup.balance)
    return balances


def on_devices(
    row: Row, model: nn.Sequential, devices: list[torch.device], engine: EngineName = "auto"
) -> nn.Module:
    """Return a `GPipe` of a row's model, with the settings of the row (configuration).

    If the row has no pipeline, move the model to the first device and return it instead.
    """
    if row.partitions is None:
        return model.to(devices[0])
    components = row.components
    return GPipe(
        model,
        row.balance,
        devices=devices[: row.partitions],
        chunks=row.chunks or 1,
        checkpoint=row.checkpoint or "never",
        deferred_batch_norm=row.deferred_batch_norm,
        engine=engine,
        dependency="dependency" in components,
        copy_streams="streams" in components,
        portals="portals" in components,
    )


def work_of(row: Row, seed: int) -> Work:
    """Return the training of a row on CPUs as a `Work`, which all engines can run.

    The `Work` starts from the same parameters as a `Training` of the row, and uses the same data.
    """
    torch.manual_seed(seed)
    data = FakeData([row], seed)
    device = torch.device("cpu")
    return Work(
        layers=row.sized.layers(),
        balance=row.balance or (),
        chunks=row.chunks or 1,
        checkpoint=row.checkpoint or "never",
        deferred_batch_norm=row.deferred_batch_norm,
        loss=row.criterion,
        input=data.input(row, device),
        target=data.target(row, device),
        optimizer=partial(make_optimizer, row),
    )


def make_optimizer(row: Row, model: nn.Module, **options: float) -> Optimizer:
    """Make the row's optimizer for the parameters of a model.

    `options`, such as `lr`, are further arguments of the optimizer.
    """
    kind: Callable[..., Optimizer] = getattr(torch.optim, row.optimizer.name)
    return kind(model.parameters(), **row.optimizer.options, **options)


class Training:
    """The training of a row (configuration) on its devices, which runs a step at a time.

    Between steps, gradients and activations are freed.
    """

    def __init__(  # noqa: PLR0913 - all that a training is made from
        self,
        row: Row,
        devices: Devices,
        data: FakeData,
        balancer: Balancer,
        seed: int,
        *,
        emulates: Row | None = None,
    ) -> None:
        """Build the model, the mini-batch and the optimizer. `self.row` is `row` with its balance.

        To emulate a row, pass the row as `emulates`, and the same row with fewer micro-batches as
        `row`. Then all partitions are on the first device, with the balance of `emulates`, and one
        thread runs their tasks one after another.
        """
        torch.manual_seed(seed)
        with torch.device("meta") if devices.kind == "meta" else nullcontext():
            model = row.sized.layers()
        balanced = balancer.balanced(emulates or row, model, data)
        self.row = replace(row, balance=balanced.balance)
        engine: EngineName = "auto"
        if emulates is None:
            self.devices = devices.first(row.devices)
        else:
            self.devices = devices.first(1) * row.devices
            engine = "graph"
        self.observer: Observer | None = None
        self.model = on_devices(self.row, model, self.devices, engine)
        self.partitions: list[nn.Module] = [self.model]
        if isinstance(self.model, GPipe):
            self.partitions = list(self.model.partitions)
        self.input = data.input(row, self.devices[0])
        self.target = data.target(row, self.devices[-1])
        self.optimizer = make_optimizer(row, self.model)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` for every task that runs in the `with` block.

        A task is the forward, recomputation or backward of a micro-batch in a partition. If the row
        has no pipeline, the model's forward is one task, and its backward is another.
        """
        watched: Any = self if self.row.partitions is None else self.model
        watched.observer = observer
        try:
            yield
        finally:
            watched.observer = None

    def step(self) -> Tensor:
        """Run one whole training step on the mini-batch; return the loss as a detached tensor."""
        loss = self.forward_and_backward()
        update(self.optimizer)
        return loss

    def forward_and_backward(self) -> Tensor:
        """Run forward and backward on the mini-batch; return the loss as a detached tensor.

        Afterwards, the gradients are in the parameters' `.grad`.
        """
        with observed(self.observer, "forward", 0, 0):
            output = self._forward()
        loss = self.row.criterion(output, self.target)
        del output
        with observed(self.observer, "backward", 0, 0):
            loss.backward()
        return loss.detach()

    def _forward(self) -> Any:
        if isinstance(self.input, dict):
            return self.model(**self.input)
        return self.model(self.input)


def update(optimizer: Optimizer) -> None:
    """Update parameters, and free their gradients."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def record_tasks(
    training: Training, run: Callable[[], T], before: Callable[[], object] = lambda: None
) -> tuple[Stopwatch, T]:
    """Call `run`, which runs a training, and time the tasks and copies of this training.

    Args:
        training: The training.
        run: A function that runs the training, or a part of a step.
        before: A function that is called before each task, and is not timed.

    Returns:
        A stopwatch, which has the times of the tasks and copies, and the result of `run`.
    """
    stopwatch = Stopwatch(dict(enumerate(training.devices)))

    def observe(task: Task) -> AbstractContextManager[None]:
        before()
        return stopwatch(task)

    with training.observed(observe):
        result = run()
    return stopwatch, result
