"""Test hooks that a user registers on the pipeline itself.

`model(x)` runs such hooks once, for the whole mini-batch. `model.step` runs them once for each
micro-batch, with the same results.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe

from .layers import linears

X, T = torch.rand(2, 8, 2)


def made(make: Any = GPipe, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(linears(3), [2, 1], chunks=4, schedule="1F1B", **options)


def gradients(model: Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_hooks_change_inputs_and_outputs(engine: Any) -> None:
    model = made(devices=["cpu"] * 2, engine=engine)
    shapes: list[tuple[int, ...]] = []

    def doubled(module: Module, args: Any, output: Tensor) -> Tensor:
        shapes.append((*output.shape,))
        return 2 * output

    def tripled(module: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (3 * args[0],), kwargs

    def less_one(module: Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output - 1

    model.register_forward_pre_hook(lambda module, args: args[0] + 1)
    model.register_forward_pre_hook(tripled, with_kwargs=True)
    model.register_forward_hook(doubled)
    model.register_forward_hook(less_one, with_kwargs=True)
    plain = Sequential(*model)
    expected = mse_loss(2 * plain(3 * (X + 1)) - 1, T)
    expected.backward()
    expected_grads = gradients(model)
    model.zero_grad()

    loss = model.step(mse_loss, X, T)

    assert_close(loss, expected.detach())
    assert_close(gradients(model), expected_grads)
    assert_close(model.evaluate(mse_loss, X, T), loss)
    assert shapes == [(2, 2)] * 8
    by_call = mse_loss(model(X), T)
    assert_close(by_call.detach(), loss)


@pytest.mark.ranks(2)
def test_hooks_over_ranks() -> None:
    model = made(DistributedGPipe)
    threads = made(devices=["cpu"] * 2)
    for each in (model, threads):
        each.register_forward_pre_hook(lambda module, args: args[0] + 1)
        each.register_forward_hook(lambda module, args, output: 2 * output)
    expected = threads.step(mse_loss, X, T)
    assert torch.equal(model.step(mse_loss, X, T), expected)
    by_loss = model.loss(mse_loss, X, T)
    assert_close(by_loss.detach(), expected)
    model.close()


def test_a_backward_hook_is_refused() -> None:
    model = made(devices=["cpu"] * 2)
    model.register_full_backward_hook(lambda module, grads, output_grads: None)
    with pytest.raises(RuntimeError, match="put the hook on the first or last layer"):
        model.step(mse_loss, X, T)
    model.evaluate(mse_loss, X, T)  # it has no backward


class Both(Module):
    """A module that takes two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Linear(2, 2)
        self.two = Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x) + y))


@pytest.mark.parametrize("given", [(X, T), {"x": X, "y": T}], ids=["a tuple", "a dictionary"])
def test_a_traced_module_takes_its_arguments_as_in_its_sample(given: Any) -> None:
    layers = sequential(Both(), (X, T))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4)
    expected = mse_loss(model(X, T), T).detach()
    for run in (model.step, model.evaluate, model.loss):
        loss = run(mse_loss, given, T)
        assert_close(loss.detach(), expected)


class Named(Module):
    """A module with named arguments and outputs, as Hugging Face's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(2, 2), Linear(2, 2)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"y": self.second(self.first(x) * scale)}


def test_hooks_of_a_traced_module_see_its_arguments_and_its_structure() -> None:
    batch = {"x": X, "scale": torch.ones(8, 2)}
    layers = sequential(Named(), batch)
    model = GPipe(layers, [1, len(layers) - 1], devices=["cpu"] * 2, chunks=4)
    given: list[list[str]] = []
    returned: list[list[str]] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: given.append([*kwargs]), with_kwargs=True)
    model.register_forward_hook(lambda _, __, output: returned.append([*output]))
    model(**batch)
    model.predict(batch)
    model.step(lambda output, t: mse_loss(output["y"], t), batch, T)
    assert given == [["x", "scale"]] * 3
    assert returned == [["y"]] * (1 + 1 + 4)


def test_the_input_may_have_its_name() -> None:
    model = made(devices=["cpu"] * 2)
    assert torch.equal(model(input=X), model.forward(X))
    assert torch.equal(model.forward(input=X), model(X))


@pytest.mark.ranks(2)
def test_the_input_may_have_its_name_over_ranks() -> None:
    model = made(DistributedGPipe)
    found, expected = model(input=X), model(X)
    assert torch.equal(found, expected)
    model.close()
