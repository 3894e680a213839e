"""Test `get_state_dict`, `set_state_dict` and the like of PyTorch with traced modules.

These functions, of `torch.distributed.checkpoint.state_dict`, look up the tensors of a pipeline by
the names that the tensors have in the traced module.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.functional import linear

from torchgpipe import GPipe, sequential

from ...behaviours.compare import REORDERED, differences
from ..traced import BATCH, WIDTH, Residual, Tied, Tokens

WORDS = 11


class Language(nn.Module):
    """A language model. All of its layers have tensors with names that begin with `model`.

    The last layer uses the embedding's weight. Nothing uses the parameter `parts`.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model: Any = nn.Module()
        self.model.embedding = nn.Embedding(WORDS, WIDTH)
        self.model.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.model.parts = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.model.register_buffer("scale", torch.full((), 1.5))
        self.model.register_buffer("shift", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.model.embedding(x)
        for block in self.model.blocks:
            y = y + block(y).tanh() * self.model.scale + self.model.shift
        return linear(y, self.model.embedding.weight)


Made = tuple[nn.Module, Tensor]
"""A module and a sample of its input."""

MODULES: dict[str, Callable[[], Made]] = {
    "names of its own for each layer": lambda: (Residual(), torch.randn(BATCH, WIDTH)),
    "a name that layers share": lambda: (Language(), torch.arange(BATCH)),
    "a weight with two names": lambda: (Tied(), torch.arange(BATCH)),
    "tensors of the module itself": lambda: (Tokens(), torch.randn(BATCH, 3, WIDTH)),
}

OPTIONS = {
    "default": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "on the CPU": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def trained(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
    """Train for two steps, and return their losses."""
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the states of a model and its optimizer, which two functions of PyTorch collect."""
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)


def pipelined(module: nn.Module, x: Tensor, first: int) -> GPipe:
    """Return a pipeline of two partitions, the first of which has `first` layers."""
    layers = sequential(module, x)
    return GPipe(layers, [first, len(layers) - first], devices=["cpu", "cpu"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_going_on(make: Callable[[], Made], options: StateDictOptions) -> None:
    """Check that a new pipeline continues from the state of a module, its layers, or a pipeline."""
    torch.manual_seed(0)
    module, x = make()
    fresh = copy.deepcopy(module)
    layers = sequential(copy.deepcopy(module), x)
    expected: Any = None
    for model in (module, layers, pipelined(copy.deepcopy(module), x, 1)):
        optimizer = adam(model)
        trained(model, optimizer, x)
        saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        losses = trained(model, optimizer, x)
        if expected is None:
            expected = saved[0], losses
        assert differences((saved[0], losses), expected, REORDERED) == []

        other = pipelined(copy.deepcopy(fresh), x, 2)
        optimizer = adam(other)
        weights, moments = copy.deepcopy(saved)
        both: Any = {"model_state_dict": weights, "optim_state_dict": moments}
        set_state_dict(other, optimizer, **both, options=options)
        weights, moments = get_state_dict(other, optimizer, options=options)
        assert differences(weights, saved[0]) == []
        assert moments.keys() == saved[1].keys()
        assert differences(trained(other, optimizer, x), losses, REORDERED) == []


def test_a_pipeline_inside_of_a_module() -> None:
    """Check the names of tensors of a pipeline in a module, also after copying and pickling."""
    x = torch.arange(BATCH)
    inside = {"inner": pipelined(Language(), x, 2), "tokens": nn.Linear(2, 2)}
    around: Any = nn.ModuleDict(inside)
    for model in (around, copy.deepcopy(around), pickle.loads(pickle.dumps(around))):
        optimizer = adam(model)
        trained(model["inner"], optimizer, x)
        weights, moments = states(model, optimizer)
        assert differences(weights, model.state_dict()) == []
        named = [name for name, _ in model.named_parameters()]
        assert moments["param_groups"][0]["params"] == named
    set_model_state_dict(around, weights)
    assert differences(around.state_dict(), model.state_dict()) == []


def test_attributes_stay_as_they_are() -> None:
    """Check that submodules of the traced module are no attributes of the pipeline."""
    model = pipelined(Language(), torch.arange(BATCH), 2)
    for each in (model, model[:]):
        assert not hasattr(each, "embedding")
        with pytest.raises(AttributeError, match="object has no attribute 'model'"):
            _ = each.model
    plain = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
    weights, moments = states(plain, adam(plain))
    assert weights.keys() == moments["state"].keys() == {"0.weight", "0.bias"}
