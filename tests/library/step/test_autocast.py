"""Test pipelines under autocast: in which precision backwards run, and what is kept alive."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from torchgpipe import GPipe

WIDTH = 6
X, T = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).sin(), torch.ones(4, WIDTH)
HEAD = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).cos()


class InFloat32(nn.Module):
    """A layer that computes a matrix product in float32, also under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


def in_float32(y: Tensor, t: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return mse_loss(y.float() @ HEAD, t)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_backwards_of_a_step_run_without_autocast(
    engine: Any, checkpoint: Any, schedule: str
) -> None:
    """Check that `step` has the gradients of a `backward()` that is called outside of autocast."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), InFloat32(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(layers)
    model = GPipe(
        layers,
        [1, 2],
        devices=["cpu"] * 2,
        chunks=2,
        checkpoint=checkpoint,
        engine=engine,
        schedule=schedule,
    )

    with torch.autocast("cpu", torch.bfloat16):
        model.step(in_float32, X, T)
    for x, t in zip(X.chunk(2), T.chunk(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = in_float32(plain(x), t) / 2
        loss.backward()

    found = {name: p.grad for name, p in model.named_parameters()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_close(found, expected, rtol=0, atol=0)


def test_a_graph_behind_the_input_runs_backward_without_autocast() -> None:
    torch.manual_seed(0)
    head = InFloat32()
    plain = copy.deepcopy(head)
    model = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH)), [1], devices=["cpu"], chunks=2)

    with torch.autocast("cpu", torch.bfloat16):
        hidden = head(X)
        hidden.retain_grad()
        model.step(mse_loss, hidden, T)
    plain(X).backward(hidden.grad)

    assert_close(head.weight.grad, plain.weight.grad, rtol=0, atol=0)


class Seen(nn.Linear):
    """A linear layer that notes which tensors its forwards have used as its weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weights: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.weights.append(weakref.ref(self.weight))
        return super().forward(x)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_autocast_keeps_no_weights_of_earlier_mini_batches(checkpoint: Any) -> None:
    """Check that several mini-batches in one block of autocast take no more memory than one.

    Autocast caches the low-precision copy of a weight until its block ends. In each mini-batch,
    another detached tensor takes the place of a weight.
    """
    layer = Seen()
    model = GPipe(
        nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint=checkpoint, engine="graph"
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(X).float().sum().backward()
        gc.collect()
        assert [seen() for seen in layer.weights if seen() is not layer.weight] == [None] * len(
            layer.weights
        )


def test_logs_have_no_graph() -> None:
    """Check that logs do not keep the graphs of their micro-batches, and so not the outputs."""
    model = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH)), [1], devices=["cpu"], chunks=2)

    def criterion(y: Tensor, t: Tensor) -> tuple[Tensor, Any]:
        loss = mse_loss(y, t)
        return loss, {"loss": loss, "parts": [loss, 2 * loss], "name": "mse"}

    loss = model.step(criterion, X, T)

    first, second = model.logs
    assert_close((first["loss"] + second["loss"]) / 2, loss)
    for log in (first, second):
        assert not any(x.requires_grad for x in (log["loss"], *log["parts"]))
        assert log["name"] == "mse"
