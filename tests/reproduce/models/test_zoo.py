"""Models of torchvision: their own layers, weights and names; each row has a copy."""

from __future__ import annotations

import importlib

import pytest
import torch

from reproduce.error import Error
from reproduce.models.resnet import layers_of, torchvision_model


def test_the_layers_are_the_models_and_every_row_has_its_own() -> None:
    models = importlib.import_module("torchvision.models")
    torch.manual_seed(0)
    theirs = models.squeezenet1_1(num_classes=5)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(layers_of("squeezenet1_1", 64, 5))
    states = [model.state_dict() for model in (theirs, *made)]
    for state in states[1:]:
        assert list(state) == list(states[0]) and all(map(torch.equal, state.values(), states[0].values()))
    assert not {x.data_ptr() for x in made[0].parameters()} & {x.data_ptr() for x in made[1].parameters()}


@pytest.mark.parametrize("name", ["vit_b_16", "regnet_y_1_6gf"])
def test_models_that_ask_for_more_are_built_without_memory_and_for_any_image(name: str) -> None:
    with torch.device("meta"):
        model = torchvision_model(name, 64, num_classes=5)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 5)


def test_torchvision_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchvision.models", None)
    with pytest.raises(Error, match=r"torchvision:resnet50 needs torchvision, which cannot be imported here \(.*\)"):
        torchvision_model("resnet50", 64)
