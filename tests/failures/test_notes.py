"""An error gets a note that names the layer, the stage, the rank and the micro-batch."""

import sys
from collections.abc import Callable
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
    """A layer that raises an error in call number `at`, or in backward."""

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


@pytest.mark.ranks(2)
def test_where_over_ranks() -> None:
    model = DistributedGPipe(layers(Inner(2)), [2, 1], chunks=4)
    with pytest.raises((ArithmeticError, RankFailed), match="no such luck") as caught:
        model.step(F.mse_loss, X, X)
    if model.rank == 0:
        notes = vars(caught.value)["__notes__"]
        assert notes == [LAYER + "forward of micro-batch 1", "torchgpipe: on rank 0"]
    model.close()
