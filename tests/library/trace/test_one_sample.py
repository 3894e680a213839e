"""Test layers of modules that make other calls for a single sample than for several."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from torchgpipe import GPipe, sequential
from torchgpipe.trace.refuse import Untraceable

from ...plain import Plain
from ..layers import same

X = torch.linspace(-1, 1, 4 * 6 * 8).view(4, 6, 8)


class Positions(nn.Module):
    """A module with position embeddings. It expands the positions if there are several samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if len(x) != 1:
            places = places.expand(len(x), -1)
        return self.last(torch.tanh(self.first(x) + self.embedding(places)))


class Doubling(Positions):
    """A module that doubles its output if it gets a single sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 1 else 2 * super().forward(x)


def pickled(layers: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(layers))


@pytest.mark.parametrize("copied", [same, copy.deepcopy, pickled])
@pytest.mark.parametrize("training", [True, False])
def test_it_is_run_where_the_layers_compute_the_same(
    copied: Callable[[nn.Module], Any], training: bool
) -> None:
    module = Positions()
    plain = Plain(nn.Sequential(copy.deepcopy(module)), chunks=4)
    lengths = {"x": {1: Dim("length", min=2, max=16)}}
    layers = copied(sequential(module, X, dynamic_shapes=lengths))
    model = GPipe(layers, [1, len(layers) - 1], devices=["cpu", "cpu"], chunks=4)
    model.train(training)
    for x in (X, X[:, :3], X[:1]):
        model.step(mse_loss, x, x)
        mse_loss(plain(x), x).backward()
        assert_close(model(x), plain(x))
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[f"0.{name}"].grad)


def test_it_is_refused_where_the_module_computes_something_else() -> None:
    module = Doubling()
    layers = sequential(module, X)
    assert_close(layers(X[:2]), module(X[:2]))
    with pytest.raises(Untraceable, match="micro-batches of two samples or more"):
        layers(X[:1])


def test_it_is_refused_where_nothing_can_be_compared() -> None:
    with torch.device("meta"):
        layers = sequential(Positions(), X.to("meta"))
    layers.to_empty(device="cpu")
    layers(X[:2])
    with pytest.raises(Untraceable, match="micro-batches of two samples or more"):
        layers(X[:1])
