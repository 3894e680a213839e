"""Tests that state dicts of torchgpipe 0.0.7 can be loaded into a pipeline with any balance.

Other state dicts are tested in rows/training, and copies of pipelines in rows/unusual.py.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ModuleDict, ReLU, Sequential, Tanh

from ..library.layers import same
from ..plain import piped
from .compare import differences


def layers() -> Sequential:
    named: OrderedDict[str, Module] = OrderedDict()
    block = Sequential(Linear(6, 6), ReLU(), Linear(6, 6, bias=False))
    named["stem"] = Linear(5, 6)
    named["norm"] = BatchNorm1d(6)
    named["block"] = block
    named["act"] = Tanh()
    named["head"] = Linear(6, 4)
    return Sequential(named)


def numbered_layers() -> Sequential:
    return Sequential(*layers())


def state_of_0_0_7(module: Module, balance: list[int]) -> dict[str, Tensor]:
    """Return a module's state dict with the keys that torchgpipe 0.0.7 wrote.

    For example, the usual key `0.weight` becomes `partitions.0.0.weight`: the second part is the
    number of the partition that has the layer.
    """
    children = iter(module.named_children())
    place: dict[str, int] = {}
    for j, count in enumerate(balance):
        for name, _ in islice(children, count):
            place[name] = j
    state = {}
    for name, x in module.state_dict().items():
        child, _, _ = name.partition(".")
        state[f"partitions.{place[child]}.{name}"] = x
    return state


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("build", [layers, numbered_layers], ids=["named", "numbered"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [2, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("made", [same, copy.deepcopy], ids=["itself", "a copy"])
def test_a_state_of_0_0_7_loads(
    made: Any, balance: list[int], build: Callable[[], Sequential], prefix: str
) -> None:
    saved = build()
    old = state_of_0_0_7(saved, [1, 2, 2])
    state = {prefix + name: x for name, x in old.items()}
    before = dict(state)
    model = made(piped(build(), balance))
    whole = ModuleDict({"backbone": model}) if prefix else model
    assert list(model.state_dict()) == list(saved.state_dict())
    assert differences(model.state_dict(), saved.state_dict()) != []
    whole.load_state_dict(state)
    assert differences(model.state_dict(), saved.state_dict()) == []
    assert differences(state, before) == [], "the caller's dictionary was changed"


def test_a_layer_called_partitions_keeps_its_name() -> None:
    inner = Sequential(Sequential(Linear(2, 2)))
    layers = Sequential(OrderedDict(partitions=inner))
    model = piped(layers, [1])
    state = {name: torch.ones_like(x) for name, x in model.state_dict().items()}
    assert "partitions.0.0.weight" in state
    model.load_state_dict(state)
    assert differences(model.state_dict(), state) == []


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = state_of_0_0_7(layers(), [3, 2])
    state["partitions.1.head.extra"] = state.pop("partitions.1.head.bias")
    with pytest.raises(RuntimeError, match=r"(?s)head\.bias.*head\.extra"):
        piped(layers(), [3, 2]).load_state_dict(state)
