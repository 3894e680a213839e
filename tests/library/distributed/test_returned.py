"""What calls of a pipeline return on each rank, and which mistakes with it raise an error.

Also test the warning on a rank that has nothing to give to an optimizer.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe.distributed import DistributedGPipe
from torchgpipe.distributed.no_output import NoOutput

WORLD = 2
pytestmark = pytest.mark.ranks(WORLD)
X = torch.arange(16.0).view(4, 4).sin()
CLASSES = torch.tensor([0, 3, 1, 0])


def pipeline(**options: Any) -> DistributedGPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return DistributedGPipe(layers, [1, 1], chunks=2, **options)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_backward_after_a_step_is_refused_on_all_ranks(schedule: str) -> None:
    model = pipeline(schedule=schedule)
    for _ in range(2):
        loss = model.step(mse_loss, X, X)
        with pytest.raises(RuntimeError, match=r"^step\(\) has run the backward already: remove"):
            loss.backward()


USES: dict[str, Callable[[Any], object]] = {
    "a loss of PyTorch": lambda y: cross_entropy(y, CLASSES),
    "a module that is a loss": lambda y: nn.MSELoss()(y, X),
    "a loss by hand": lambda y: (y - X).square().mean(),
    "a loss of flattened scores": lambda y: cross_entropy(y.flatten(0, 1), CLASSES),
    "a loss of scores in a vector": lambda y: cross_entropy(y.view(-1), CLASSES),
    "all but the last": lambda y: y[:, :-1],
    "an entry": lambda y: y["logits"],
    "two outputs": lambda y: [*y],
    "an attribute": lambda y: y.logits,
    "the most likely class": lambda y: y.argmax(1),
}


@pytest.mark.parametrize("name", USES)
def test_the_output_is_not_used_on_other_ranks(name: str) -> None:
    model = pipeline()
    output = model(X)
    if model.rank == WORLD - 1:
        assert type(output) is Tensor
    else:
        with pytest.raises((RuntimeError, TypeError, AttributeError)) as caught:
            USES[name](output)
        assert str(caught.value).startswith("only the rank of the last stage has the output")
        assert "\n" not in str(caught.value)
        assert not hasattr(output, "logits")
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_other_ranks_get_is_a_scalar_with_a_backward() -> None:
    model = pipeline()
    x = X.clone().requires_grad_()
    outputs = [model(x) for _ in range(3)]
    if model.rank == WORLD - 1:
        for output in outputs:
            output.sum().backward()
        return
    first, second, third = outputs
    assert f"{first:.2f} {first.item()}" == "0.00 0.0"
    penalty = torch.ones((), requires_grad=True)
    (2 * first + penalty * second.detach() + penalty).backward()
    assert penalty.grad == 1
    second.backward(torch.ones(()))
    assert type(x.grad) is Tensor
    (gradient,) = torch.autograd.grad(third, x)
    assert type(gradient) is Tensor
    torch.testing.assert_close(2 * gradient, x.grad)
    assert isinstance(third, NoOutput)


def test_a_rank_without_parameters_is_told_how_to_make_its_optimizer() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedGPipe(layers, [1, 1], chunks=2)
        DistributedGPipe(nn.Sequential(nn.Tanh(), nn.ReLU()), [1, 1])
    lines = [str(each.message) for each in caught]
    if model.rank == 0:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("rank 1 has no parameters")
        assert "torch.optim.SGD([{'params': list(model.parameters())}], lr=0.1)" in line
        assert caught[0].filename == __file__
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1)
    model.step(mse_loss, X, X)
    optimizer.step()
