"""Hooks on the pipeline itself see in a step what they see in `model(x)`, for each micro-batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe

from .layers import linears

X, T = torch.rand(2, 8, 2)


def made(make: Any = GPipe, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(linears(3), [2, 1], chunks=4, schedule="1F1B", **options)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_hooks_change_inputs_and_outputs(engine: Any) -> None:
    model, shapes = made(devices=["cpu"] * 2, engine=engine), list[Any]()

    def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        shapes.append((*output.shape,))
        return 2 * output

    model.register_forward_pre_hook(lambda module, args: args[0] + 1)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: ((3 * args[0],), kwargs), with_kwargs=True
    )
    model.register_forward_hook(doubled)
    model.register_forward_hook(lambda module, args, kwargs, output: output - 1, with_kwargs=True)
    plain = nn.Sequential(*model)
    expected = mse_loss(2 * plain(3 * (X + 1)) - 1, T)
    expected.backward()
    found = [expected.detach(), *map(torch.clone, gradients(model))]  # type: ignore[arg-type]
    model.zero_grad()
    loss = model.step(mse_loss, X, T)
    torch.testing.assert_close([loss, *gradients(model)], found)
    torch.testing.assert_close(model.evaluate(mse_loss, X, T), loss)
    assert shapes == [(2, 2)] * 8
    torch.testing.assert_close(mse_loss(model(X), T).detach(), loss)


@pytest.mark.ranks(2)
def test_hooks_over_ranks() -> None:
    model, threads = made(DistributedGPipe), made(devices=["cpu"] * 2)
    for each in (model, threads):
        each.register_forward_pre_hook(lambda module, args: args[0] + 1)
        each.register_forward_hook(lambda module, args, output: 2 * output)
    expected = threads.step(mse_loss, X, T)
    assert torch.equal(model.step(mse_loss, X, T), expected)
    torch.testing.assert_close(model.loss(mse_loss, X, T).detach(), expected)
    model.close()


def test_a_backward_hook_is_refused() -> None:
    model = made(devices=["cpu"] * 2)
    model.register_full_backward_hook(lambda module, grads, output_grads: None)
    with pytest.raises(RuntimeError, match="put it on the first or last layer"):
        model.step(mse_loss, X, T)


class Both(nn.Module):
    """A module of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x) + y))


@pytest.mark.parametrize("given", [(X, T), {"x": X, "y": T}], ids=["a tuple", "a dictionary"])
def test_a_traced_module_takes_its_arguments_as_in_its_sample(given: Any) -> None:
    model = GPipe(sequential(Both(), (X, T)), [1, 1], devices=["cpu"] * 2, chunks=4)
    expected = mse_loss(model(X, T), T).detach()
    for run in (model.step, model.evaluate, model.loss):
        torch.testing.assert_close(run(mse_loss, given, T).detach(), expected)
