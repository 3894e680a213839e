"""Copies between devices: what waits for what, in both directions.

There may be no CUDA device here, so streams are stand-ins that write down what is asked of them, and two names of
the CPU are the two devices. tests/test_cuda.py runs the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.copy
from torchgpipe import GPipe
from torchgpipe.copy import CopyStreams, Route
from torchgpipe.skip import pop, skippable, stash

CPU, OTHER, META = torch.device("cpu"), torch.device("cpu", 0), torch.device("meta")
NAMES = {CPU: "source", OTHER: "target"}


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace streams, and write down what happens with them."""
    log: list[str] = []
    compute = {device: Stream(f"{name} compute", log) for device, name in NAMES.items()}
    current: list[str] = []

    @contextmanager
    def using(*streams: Stream | None) -> Iterator[None]:
        names = [stream.name for stream in streams if stream is not None]
        current.extend(names)
        yield
        del current[len(current) - len(names) :]

    move = Route.move

    def logged_move(self: Route, x: Tensor, target: torch.device, i: int = 0) -> Tensor:
        with using(self._outbound, self._inbound):  # type: ignore[arg-type]
            log.append(f"copy to {NAMES[target]} on {' and '.join(current)}")
        return move(self, x, target, i)

    monkeypatch.setattr(torchgpipe.copy, "current_stream", compute.get)
    monkeypatch.setattr(torchgpipe.copy, "using", using)
    monkeypatch.setattr(Route, "move", logged_move)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: log.append(f"memory is used by {stream.name}"))
    return log


def copy_streams(device: torch.device, log: list[str], *, enabled: bool = True) -> CopyStreams:
    streams = CopyStreams(device)
    if enabled:
        streams.inbound = Stream(f"{NAMES[device]} inbound", log)  # type: ignore[assignment]
        streams.outbound = Stream(f"{NAMES[device]} outbound", log)  # type: ignore[assignment]
    return streams


# With copy streams of their own, and without: forward, backward.
WAITS = {
    True: (
        [
            "source outbound waits for source compute",
            "memory is used by source outbound",
            "copy to target on source outbound and target inbound",
            "target compute waits for target inbound",
            "memory is used by target compute",
        ],
        [
            "target inbound waits for target compute",
            "memory is used by target inbound",
            "copy to source on source outbound and target inbound",
            "source compute waits for source outbound",
            "memory is used by source compute",
        ],
    ),
    False: (
        ["copy to target on source compute and target compute"],
        ["copy to source on source compute and target compute"],
    ),
}


@pytest.mark.parametrize("enabled", [True, False], ids=["copy streams", "compute streams"])
def test_waits(log: list[str], enabled: bool) -> None:
    route = Route(copy_streams(CPU, log, enabled=enabled), copy_streams(OTHER, log, enabled=enabled))
    x = torch.rand(3, requires_grad=True)

    y = route.copy(route.depart(x))
    forward, log[:] = list(log), []
    y.backward(torch.ones(3))
    backward = list(log)

    assert (forward, backward) == WAITS[enabled]
    assert torch.equal(y, x)
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


def test_nothing_is_done_within_a_device(log: list[str]) -> None:
    route = Route(copy_streams(CPU, log), copy_streams(CPU, log))
    x = torch.rand(3, requires_grad=True)

    assert route.copy(route.depart(x)) is x
    assert not route.elsewhere
    assert log == []


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("x", [torch.rand(3), torch.arange(3), torch.tensor([True])], ids=["float", "int", "bool"])
def test_tensors_without_gradient_go_the_same_way(log: list[str], x: Tensor, grad: bool) -> None:
    route = Route(copy_streams(CPU, log), copy_streams(OTHER, log))
    with torch.set_grad_enabled(grad):
        y = route.copy(route.depart(x))

    assert log == WAITS[True][0]
    assert torch.equal(y, x)
    assert not y.requires_grad


def test_a_gradient_that_is_not_there_is_not_copied(log: list[str]) -> None:
    route = Route(copy_streams(CPU, log), copy_streams(OTHER, log))
    x, other = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0], None

    y = First.apply(other, route.copy(route.depart(x)))
    log.clear()
    y.sum().backward()

    assert x.grad is None
    assert [entry for entry in log if "copy" in entry or "memory" in entry] == []


def test_to_meta() -> None:
    route = Route(CopyStreams(CPU), CopyStreams(META))
    x = torch.rand(3, 4, requires_grad=True)
    y = route.copy(route.depart(x))
    assert (y.device, y.shape, y.requires_grad) == (META, x.shape, True)


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_only_cuda_has_copy_streams(device: torch.device) -> None:
    streams = CopyStreams(device)
    assert streams.inbound is streams.outbound is None


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


def pipeline(log: list[str], *layers: nn.Module) -> GPipe:
    n = len(layers)
    model = GPipe(nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, chunks=1, checkpoint="always", engine="graph")
    engine: Any = model._engines.graph
    for j, stage in enumerate(engine.stages):
        stage.device = OTHER if j + 1 == n else CPU
    engine.copies = [copy_streams(stage.device, log) for stage in engine.stages]
    return model


def test_a_recomputation_is_launched_before_its_gradient_is_waited_for(log: list[str]) -> None:
    """The source's stream gets the recomputation first, and then has to wait for the copy; so they overlap."""
    model = pipeline(log, Noted("first", log), Noted("last", log))
    loss = model(torch.rand(2, 2)).sum()
    log.clear()
    loss.backward()

    assert [entry for entry in log if "memory" not in entry] == [
        "last runs",
        "last goes backward",
        "target inbound waits for target compute",
        "copy to source on source outbound and target inbound",
        "first runs",
        "source compute waits for source outbound",
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


def test_also_where_only_a_skip_takes_a_gradient(log: list[str]) -> None:
    model = pipeline(log, Stash(log), nn.Identity(), Pop())
    loss = model(torch.tensor([[0.0, 1.0], [0.0, 1.0]])).sum()
    log.clear()
    loss.backward()

    assert log.index("first runs") < log.index("source compute waits for source outbound")
    assert log.index("source compute waits for source outbound") < log.index("first goes backward")


def test_a_skip_is_copied_once_and_on_its_own(log: list[str]) -> None:
    """Past the partition in between: from its source to its target, when the target's task comes."""
    model = pipeline(log, Stash(log), nn.Identity(), Pop())
    with torch.no_grad():
        model(torch.rand(2, 2))
    assert len([entry for entry in log if entry.startswith("copy to target")]) == 2
