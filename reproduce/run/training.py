"""Make one row of an experiment ready to train: its model, on its devices, with data and an optimizer."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from reproduce.experiments.row import EQUAL_LAYERS, PLANNED, Row
from reproduce.machine.devices import MOST_DEVICES, Devices
from reproduce.models.built import MODELS, changed
from reproduce.run.engines.engines import Work
from torchgpipe import GPipe
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.balance.profile import profile_times
from torchgpipe.gpipe import EngineName
from torchgpipe.plan import plan
from torchgpipe.tensors.observe import Observer, observed
from torchgpipe.timeline.stopwatch import Stopwatch
from torchgpipe.trace.layer import flat

PROFILE_SECONDS = 1.0  # for each model and input
PROFILE_SAMPLES = 16  # at most; enough to compare layers
NO_LIMIT = 2.0**60  # bytes; a row that does not fit runs out of memory when it runs


class FakeData:
    """Draw mini-batches once. A row gets the first samples, so rows of all batch sizes share their tensors."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.drawn: dict[tuple[object, ...], Any] = {}

    def part(self, part: int, row: Row, device: torch.device) -> Any:
        """Return the row's input (0) or its target (1) on `device`."""
        alike, *others = [
            (MODELS[x.model].sample, x.input_shape, x.num_classes) for x in (row, *self.rows)
        ]
        if alike not in self.drawn:
            most = max(
                x.batch_size for x, other in zip(self.rows, others, strict=True) if other == alike
            )
            self.drawn[alike] = row.sized.batch(most, self.seed)
        if (part, alike, device) not in self.drawn:
            self.drawn[part, alike, device] = changed(
                lambda x: x.to(device), self.drawn[alike][part]
            )
        return changed(lambda x: x[: row.batch_size], self.drawn[part, alike, device])

    input, target = partialmethod(part, 0), partialmethod(part, 1)


class Balancer:
    """Balance models over partitions by profiling, once for each model and number of samples.

    Rows `PLANNED` get the balance of `torchgpipe.plan`; rows `EQUAL_LAYERS` get equally many layers per partition.
    """

    def __init__(self, devices: Devices) -> None:
        (self.device,) = devices.first(1)
        self.profiles: dict[tuple[object, ...], list[float]] = {}  # seconds of each layer
        self.plans: dict[
            tuple[object, ...], dict[int, tuple[int, ...]]
        ] = {}  # a balance for each number of partitions

    def balanced(self, row: Row, model: nn.Sequential, data: FakeData) -> Row:
        """Return `row` with a balance: its own if it has one."""
        if row.partitions is None or row.balance is not None:
            return row
        if row.partitions == 1:
            return replace(row, balance=(len(model),))
        if row.configuration == EQUAL_LAYERS:
            each, more = divmod(len(model), row.partitions)
            return replace(row, balance=tuple(each + (j < more) for j in range(row.partitions)))

        # Rows at equal batch size share a balance. Profile a quarter of the batch: between their micro-batch sizes.
        samples = (
            math.ceil(row.batch_size / 4) if row.equal == "batch" else row.micro_batch_size or 1
        )
        samples = min(samples, PROFILE_SAMPLES, row.batch_size)
        sample = changed(lambda x: x[:samples], data.input(row, self.device))
        key = (row.sized, samples)
        if row.configuration == PLANNED:
            if key not in self.plans:
                self.plans[key] = planned_balances(row, model, sample)
            return replace(row, balance=self.plans[key][row.partitions])
        if key not in self.profiles:
            self.profiles[key] = profile_times(
                model, flat(model, sample), PROFILE_SECONDS, self.device
            )
        return replace(row, balance=tuple(minimise_heaviest(self.profiles[key], row.partitions)))


def planned_balances(row: Row, model: nn.Sequential, sample: Any) -> dict[int, tuple[int, ...]]:
    """Profile the model on the sample's device; return the best balance for each number of partitions."""
    found = plan(
        model,
        sample,
        batch_size=row.batch_size,
        devices=MOST_DEVICES,
        memory=NO_LIMIT,
        chunks=row.micro_batches,
        checkpoint=row.checkpoint or "never",
    )
    return {
        n: tuple(each.best.setup.balance)
        for n, each in found.by_devices.items()
        if each.best is not None
    }


def on_devices(
    row: Row, model: nn.Sequential, devices: list[torch.device], engine: EngineName = "auto"
) -> nn.Module:
    """Wrap the model in the row's pipeline, or move it to the first device if the row has no pipeline."""
    if row.partitions is None:
        return model.to(devices[0])
    return GPipe(
        model,
        row.balance,
        devices=devices[: row.partitions],
        chunks=row.chunks or 1,
        checkpoint=row.checkpoint or "never",
        deferred_batch_norm=row.deferred_batch_norm,
        engine=engine,
        dependency="dependency" in row.components,
        copy_streams="streams" in row.components,
        portals="portals" in row.components,
    )


def work_of(row: Row, seed: int) -> Work:
    """Return the row's training on CPUs, with the same parameters, samples and optimizer as `Training`."""
    torch.manual_seed(seed)
    data, device = FakeData([row], seed), torch.device("cpu")
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


def make_optimizer(row: Row, model: nn.Module, **options: float) -> torch.optim.Optimizer:
    """Make the row's optimizer, with further options."""
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, row.optimizer.name)
    return kind(model.parameters(), **row.optimizer.options, **options)


class Training:
    """Train one row's model, a step at a time. Gradients and activations do not stay alive between steps."""

    def __init__(
        self,
        row: Row,
        devices: Devices,
        data: FakeData,
        balancer: Balancer,
        seed: int,
        *,
        emulates: Row | None = None,
    ) -> None:
        """Build everything; `self.row` has the balance that is used.

        To emulate a row, pass it as `emulates`, and its shortened row as `row`. Then all partitions are on the first
        device, in the balance of the full row, and one thread runs their tasks one after another.
        """
        torch.manual_seed(seed)
        with torch.device("meta") if devices.kind == "meta" else contextlib.nullcontext():
            model = row.sized.layers()
        self.row = replace(row, balance=balancer.balanced(emulates or row, model, data).balance)
        self.devices = devices.first(1) * row.devices if emulates else devices.first(row.devices)
        self.observer: Observer | None = None
        self.model = on_devices(self.row, model, self.devices, "graph" if emulates else "auto")
        self.partitions = (
            list(self.model.partitions) if isinstance(self.model, GPipe) else [self.model]
        )
        self.input = data.input(row, self.devices[0])
        self.target = data.target(row, self.devices[-1])
        self.optimizer = make_optimizer(row, self.model)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` for every task; without a pipeline, forward and backward of the model are one task each."""
        watched: Any = self if self.row.partitions is None else self.model
        watched.observer = observer
        try:
            yield
        finally:
            watched.observer = None

    def step(self) -> Tensor:
        """Do one whole training step on the mini-batch and return its loss, still on its device."""
        loss = self.forward_and_backward()
        update(self.optimizer)
        return loss

    def forward_and_backward(self) -> Tensor:
        """Return the loss, still on its device. Gradients are in the parameters' `.grad`."""
        with observed(self.observer, "forward", 0, 0):
            output = (
                self.model(**self.input) if isinstance(self.input, dict) else self.model(self.input)
            )
        loss = self.row.criterion(output, self.target)
        del output
        with observed(self.observer, "backward", 0, 0):
            loss.backward()
        return loss.detach()


def update(optimizer: torch.optim.Optimizer) -> None:
    """Update parameters, and free their gradients."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def record_tasks(training: Training, run: Callable[[], object]) -> Stopwatch:
    """Call `run`; return a stopwatch with the times of all tasks and of all copies between devices."""
    stopwatch = Stopwatch(dict(enumerate(training.devices)))
    with training.observed(stopwatch):
        run()
    return stopwatch
