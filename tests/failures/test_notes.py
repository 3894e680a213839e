"""Check that an error says where it was raised.

A note on the error names the layer, the stage, the rank and the micro-batch. The traceback shows
the user's code, and only a few functions of the library.
"""

import sys
from collections.abc import Callable
from traceback import format_exception, walk_tb
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.tensors.checkpoint import Mode

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before Python 3.11 errors have no notes"
)

X = torch.rand(8, 2)


class Inner(nn.Module):
    """A layer that raises an error in its `at`-th forward, or in backward if `backward` is true."""

    def __init__(self, at: int, backward: bool = False) -> None:
        super().__init__()
        self.at, self.backward, self.calls = at, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.backward and x.requires_grad:
            x = x * 1
            x.register_hook(self.fail)
        elif self.calls == self.at:
            raise ArithmeticError("no such luck")
        return x

    def fail(self, _: Tensor) -> None:
        raise ArithmeticError("no such luck")


def layers(inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), inner), nn.Linear(2, 2))


def call(model: Any) -> None:
    model(X).sum().backward()


def step(model: Any) -> None:
    model.step(F.mse_loss, X, X)


def without_gradients(model: Any) -> None:
    with torch.no_grad():
        model(X)


def evaluate(model: Any) -> None:
    model.evaluate(F.mse_loss, X, X)


def in_the_criterion(model: Any) -> None:
    def fail(*_: Tensor) -> Tensor:
        raise ArithmeticError("no such luck")

    model.step(fail, X, X)


LAYER = "torchgpipe: in layer '1.1' (Inner) of stage 0, "
CASES: dict[str, tuple[Inner, Mode, Callable[[Any], None], str]] = {
    "a forward": (Inner(2), "never", call, LAYER + "forward of micro-batch 1"),
    "a first pass": (Inner(3), "always", call, LAYER + "forward of micro-batch 2"),
    "a recomputation": (Inner(6), "always", call, LAYER + "recomputation of micro-batch 2"),
    "a backward": (Inner(0, True), "except_last", call, LAYER + "backward of micro-batch 3"),
    "a step": (Inner(2), "never", step, LAYER + "forward of micro-batch 1"),
    "without gradients": (Inner(4), "never", without_gradients, LAYER + "forward of micro-batch 3"),
    "the criterion": (
        Inner(0),
        "never",
        in_the_criterion,
        "torchgpipe: in the criterion, micro-batch 0",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_where(engine: Any, name: str) -> None:
    inner, mode, run, expected = CASES[name]
    inner.calls = 0
    devices = ["cpu"] * 2
    model = GPipe(layers(inner), [2, 1], devices=devices, chunks=4, checkpoint=mode, engine=engine)
    model.observer = None if engine == "workers" else lambda _: torch.enable_grad()
    with pytest.raises(ArithmeticError) as caught:
        run(model)
    assert vars(caught.value)["__notes__"] == [expected]
    assert format_exception(caught.value)[-1].strip() == expected
    functions, own = shown(caught.tb)
    assert functions[:2] == ["test_where", run.__name__]
    assert functions[-1] in ("forward", "fail")
    # The frames that were added after the library had shortened the traceback.
    assert own in (
        ["torchgpipe.gpipe.forward"],
        ["torchgpipe.partitioned.step"],
        # In backward(), the user calls PyTorch.
        [],
        ["torchgpipe.engine.graph_nodes.backward"],
    )


def shown(traceback: TracebackType) -> tuple[list[str], list[str]]:
    """Return the names of all functions in a traceback, and of the library's functions in it."""
    functions, own = [], []
    for frame, _ in walk_tb(traceback):
        name = frame.f_code.co_name
        functions.append(name)
        module = frame.f_globals["__name__"]
        if module.startswith("torchgpipe."):
            own.append(f"{module}.{name}")
    return functions, own


class Noting(nn.Module):
    """A layer that raises an error which already has a note."""

    def forward(self, x: Tensor) -> Tensor:
        error: Any = ArithmeticError("no such luck")
        error.add_note("mine")
        raise error


@pytest.mark.parametrize("run", [call, step, evaluate])
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_an_error_with_a_note_gets_another_note(engine: Any, run: Callable[[Any], None]) -> None:
    model = GPipe(layers(Noting()), [2, 1], devices=["cpu"] * 2, chunks=4, engine=engine)
    with pytest.raises(ArithmeticError) as caught:
        run(model)
    where = "torchgpipe: in layer '1.1' (Noting) of stage 0, forward of micro-batch 0"
    assert vars(caught.value)["__notes__"] == ["mine", where]


class Refused(nn.Module):
    """A layer whose forward calls the library with a wrong argument."""

    def forward(self, x: Tensor) -> Tensor:
        GPipe(nn.Linear(2, 2), [1])  # type: ignore[arg-type]
        return x


def test_an_error_that_a_layer_gets_from_the_library_shows_where() -> None:
    model = GPipe(layers(Refused()), [2, 1], devices=["cpu"] * 2, chunks=4)
    with pytest.raises(TypeError) as caught:
        step(model)
    functions, _ = shown(caught.tb)
    here = "test_an_error_that_a_layer_gets_from_the_library_shows_where"
    assert functions == [here, "step", "step", "forward", "__init__", "__init__", "check_module"]


def test_a_fault_of_the_library_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no such luck")

    monkeypatch.setattr("torchgpipe.task.task.check_attributes", fail)
    model = GPipe(layers(nn.Tanh()), [2, 1], devices=["cpu"] * 2, chunks=4)
    with pytest.raises(ArithmeticError) as caught:
        step(model)
    functions, _ = shown(caught.tb)
    assert {"run_uncompiled", "attempt", "_forward", "_build"} < set(functions)


@pytest.mark.ranks(2)
def test_where_over_ranks() -> None:
    model = DistributedGPipe(layers(Inner(2)), [2, 1], chunks=4)
    with pytest.raises((ArithmeticError, RankFailed), match="no such luck") as caught:
        model.step(F.mse_loss, X, X)
    where = LAYER + "forward of micro-batch 1"
    if model.rank == 0:
        assert vars(caught.value)["__notes__"] == [where, "torchgpipe: on rank 0"]
        _, own = shown(caught.tb)
        assert own == ["torchgpipe.partitioned.step"]
    else:
        place = where.removeprefix("torchgpipe: ")
        told = "rank 0 failed in forward of micro-batch 1: ArithmeticError: no such luck"
        assert str(caught.value) == f"{told} ({place})"
    model.close()
