"""Test that layers whose classes have versions of their state do not convert their own state."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear, Module, Sequential

from torchgpipe import GPipe, sequential
from torchgpipe.state.saves import Saves


class Versioned(Linear):
    """A layer that converts the weight when it loads a state of the layer's first version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_state_has_the_version_of_the_layers_that_saved_it(tmp_path: Path) -> None:
    model = GPipe(Sequential(Versioned(2, 2)), [1], devices=["cpu"])
    saves = Saves(tmp_path)
    saves.save(0, model, None)
    weight = model[0].weight.detach().clone()
    saves.load(model, None)
    assert torch.equal(model[0].weight, weight)


class Around(Module):
    """A module with a version of its own, and with a submodule that has another version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sequential(Versioned(2, 2), Linear(2, 2))
        self.last = Versioned(2, 2)
        self.loaded: list[int] = []

    def forward(self, x: Any) -> Any:
        return self.last(self.inner(x))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded.append(metadata.get("version", 1))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_state_of_a_traced_module_has_its_versions(tmp_path: Path) -> None:
    """Check that a state is not converted, whether the module or its layers save or load it."""
    module = Around()
    layers = sequential(module, torch.rand(2, 2))
    model = GPipe(layers, [1, len(layers) - 1], devices=["cpu"] * 2)
    expected = copy.deepcopy(module.state_dict())
    saves = Saves(tmp_path)
    saves.save(0, model, None)
    saves.load(model, None)
    model.load_state_dict(module.state_dict())
    layers.load_state_dict(model.state_dict())
    other = Around()
    other.load_state_dict(model.state_dict())
    assert other.loaded == [3]
    for each in (module, other):
        for name, x in each.state_dict().items():
            assert torch.equal(x, expected[name]), name
