"""Copies between devices: what waits for what, in both directions.

There may be no CUDA device here, so streams are stand-ins that write down what is asked of them (conftest.py), and two
names of the CPU are the two devices. tests/test_cuda.py runs the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.copy import CopyStreams, Dock, Route
from torchgpipe.skip import pop, skippable, stash

SOURCE, TARGET, META = torch.device("cpu", 0), torch.device("cpu", 1), torch.device("meta")


def passage(source: torch.device, target: torch.device, *, enabled: bool = True) -> Route:
    return Route(CopyStreams([source, target], enabled=enabled), 0, 1)


def sent(route: Route, *tensors: Tensor, i: int = 0) -> tuple[Any, ...]:
    """Let the tensors of a task depart, copy them, and let them arrive."""
    departure, arrival = Dock(route.source), Dock(route.target)
    away = departure.depart(tensors, [route] * len(tensors))
    return arrival.arrive(tuple(None if x is None else route.copy(x, i, departure, arrival) for x in away))


# With copy streams of their own, and without: forward, backward.
WAITS = {
    True: (
        [
            "cpu:0 copies waits for cpu:0 compute",
            "memory is used by cpu:0 copies",
            "copy to cpu:1 on cpu:0 copies and cpu:1 copies",
            "cpu:1 compute waits for cpu:1 copies",
            "memory is used by cpu:1 compute",
        ],
        [
            "cpu:1 copies waits for cpu:1 compute",
            "memory is used by cpu:1 copies",
            "copy to cpu:0 on cpu:0 copies and cpu:1 copies",
            "cpu:0 compute waits for cpu:0 copies",
            "memory is used by cpu:0 compute",
        ],
    ),
    False: (
        ["copy to cpu:1 on cpu:0 compute and cpu:1 compute"],
        ["copy to cpu:0 on cpu:0 compute and cpu:1 compute"],
    ),
}


@pytest.mark.parametrize("enabled", [True, False], ids=["copy streams", "compute streams"])
def test_waits(streams: Any, enabled: bool) -> None:
    x = torch.rand(3, requires_grad=True)

    (y,) = sent(passage(SOURCE, TARGET, enabled=enabled), x)
    forward, streams.log[:] = list(streams.log), []
    y.backward(torch.ones(3), retain_graph=True)

    assert (forward, streams.log) == WAITS[enabled]
    assert torch.equal(y, x)
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]

    streams.log.clear()
    y.backward(torch.ones(3))
    assert streams.log == WAITS[enabled][1]


def test_nothing_is_done_within_a_device(streams: Any) -> None:
    x = torch.rand(3, requires_grad=True)
    route = passage(SOURCE, SOURCE)
    assert sent(route, x)[0] is x
    assert not route.elsewhere
    assert streams.log == []


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("x", [torch.rand(3), torch.arange(3), torch.tensor([True])], ids=["float", "int", "bool"])
def test_tensors_without_gradient_go_the_same_way(streams: Any, x: Tensor, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        (y,) = sent(passage(SOURCE, TARGET), x)

    assert streams.log == WAITS[True][0]
    assert torch.equal(y, x)
    assert not y.requires_grad


def test_tensors_of_a_task_go_together(streams: Any) -> None:
    """In backward neither stream may wait for one gradient before the other is on its way."""
    tensors = torch.rand(3, requires_grad=True), torch.rand(3), torch.arange(3), torch.rand(2, requires_grad=True)
    arrived = sent(passage(SOURCE, TARGET), *tensors)
    assert [y.requires_grad for y in arrived] == [True, False, False, True]
    assert all(map(torch.equal, arrived, tensors))

    arrival = arrived[0].grad_fn
    departures = {copy.next_functions[0][0] for copy, _ in arrival.next_functions}
    assert arrived[3].grad_fn is arrival
    assert len(departures) == 1

    ((arrived[0] * 2).sum() + (arrived[3] * 3).sum()).backward()
    assert [None if x.grad is None else x.grad.tolist() for x in tensors] == [[2, 2, 2], None, None, [3, 3]]


def test_a_gradient_that_is_not_there_is_not_copied(streams: Any) -> None:
    x, other = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0], None

    y = First.apply(other, *sent(passage(SOURCE, TARGET), x))
    streams.log.clear()
    y.sum().backward()

    assert x.grad is None
    assert streams.log == []


def test_nothing_waits_for_what_was_issued_later(streams: Any) -> None:
    """Two micro-batches: the second departs before the first is copied, its gradient is copied before the first's is
    met. On CUDA the threads of autograd may well get so far ahead of each other."""
    streams.seconds = {(0, 1): 1.0}
    source, target = streams.of(SOURCE), streams.of(TARGET)
    route = passage(SOURCE, TARGET)
    leaves = [torch.rand(3, requires_grad=True) for _ in range(2)]
    departures, arrivals = [Dock(SOURCE) for _ in range(2)], [Dock(TARGET) for _ in range(2)]

    away = []
    for x, departure in zip(leaves, departures, strict=True):
        source.run(5.0)
        away.append(departure.depart((x,), [route])[0])
    copies = [route.copy(away[i], i, departures[i], arrivals[i]) for i in range(2)]
    arrived, clocks = [], []
    for y, arrival in zip(copies, arrivals, strict=True):
        arrived.append(arrival.arrive((y,))[0])
        clocks.append(target.clock)
    assert clocks == [5.0 + 1.0, 10.0 + 1.0]

    clocks.clear()
    for x in leaves:
        x.register_hook(lambda _: clocks.append(source.clock))
    source.clock = target.clock
    # Autograd takes the latest node first: both copies, before both departures.
    sum(y.sum() for y in arrived).backward()  # type: ignore[union-attr]
    assert clocks == [11.0 + 1.0, 11.0 + 2.0]


def test_to_meta() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    (y,) = sent(passage(SOURCE, META), x)
    assert (y.device, y.shape, y.requires_grad) == (META, x.shape, True)


@pytest.mark.parametrize("device", [SOURCE, META], ids=str)
def test_only_cuda_has_copy_streams(device: torch.device) -> None:
    streams = CopyStreams([device, device])
    assert streams.between(0, 1) == (None, None)
    assert streams.aside(0) is None


def test_every_way_has_streams_of_its_own_that_are_kept(streams: Any) -> None:
    copies = CopyStreams([torch.device("cpu", j) for j in range(3)])
    made = {stream for way in [(0, 1), (1, 2), (0, 2)] for stream in copies.between(*way)}
    made |= {copies.aside(j) for j in range(3)}
    assert len(made) == 9
    assert copies.between(0, 2) == copies.between(0, 2)


class Noted(nn.Module):
    """Write down its forward, its recomputation and its backward."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"{self.name} runs")
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.log.append(f"{self.name} goes backward"))
        return y


def pipeline(*layers: nn.Module) -> GPipe:
    n = len(layers)
    devices = [*[SOURCE] * (n - 1), TARGET]
    return GPipe(nn.Sequential(*layers), [1] * n, devices=devices, chunks=1, checkpoint="always", engine="graph")


def test_a_recomputation_is_launched_before_its_gradient_is_waited_for(streams: Any) -> None:
    """The source's stream gets the recomputation first, and then has to wait for the copy; so they overlap."""
    log = streams.log
    model = pipeline(Noted("first", log), Noted("last", log))
    loss = model(torch.rand(2, 2)).sum()
    log.clear()
    loss.backward()

    assert [entry for entry in log if "memory" not in entry] == [
        "last runs",
        "last goes backward",
        "cpu:1 copies waits for cpu:1 compute",
        "copy to cpu:0 on cpu:0 copies and cpu:1 copies",
        "first runs",
        "cpu:0 compute waits for cpu:0 copies",
        "first goes backward",
    ]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.noted = Noted("first", log)

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.noted(x))
        return x.argmax(1)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return skip * x.unsqueeze(1)


def test_also_where_only_a_skip_takes_a_gradient(streams: Any) -> None:
    log = streams.log
    model = pipeline(Stash(log), nn.Identity(), Pop())
    loss = model(torch.tensor([[0.0, 1.0], [0.0, 1.0]])).sum()
    log.clear()
    loss.backward()

    assert log.index("first runs") < log.index("cpu:0 compute waits for cpu:0 copies")
    assert log.index("cpu:0 compute waits for cpu:0 copies") < log.index("first goes backward")


def test_a_skip_is_copied_once_and_on_its_own(streams: Any) -> None:
    """Past the partition in between: from its source to its target, when the target's task comes."""
    model = pipeline(Stash(streams.log), nn.Identity(), Pop())
    with torch.no_grad():
        model(torch.rand(2, 2))
    assert len([entry for entry in streams.log if entry.startswith("copy to cpu:1")]) == 2


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_streams_change_no_result(streams: Any, checkpoint: Any) -> None:
    """Every gradient finds its way back, by whatever nodes it passes: also those of skips, and of several tensors."""
    results = []
    for on in (True, False):
        streams.log.clear()
        torch.manual_seed(0)
        relu = nn.ReLU(inplace=checkpoint == "never")  # the first to get what arrives
        layers = nn.Sequential(nn.Linear(2, 2), Keep(), relu, nn.Linear(2, 2), nn.Linear(2, 2), Add())
        devices = [SOURCE, TARGET, torch.device("cpu", 2)]
        model = GPipe(
            layers, [2] * 3, devices=devices, chunks=4, checkpoint=checkpoint, copy_streams=on, engine="graph"
        )
        x = torch.rand(8, 2, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        assert any("waits" in entry for entry in streams.log) == on
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@skippable(stash=["kept"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x.sin())
        return x.cos()


@skippable(pop=["kept"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        kept = yield pop("kept")
        return x + 3 * kept
