"""State dicts of 0.0.7 load with any balance. See rows/training.py for other states, rows/unusual.py for copies."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..plain import piped
from .compare import differences


def layers() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6, bias=False))
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(5, 6),
            norm=nn.BatchNorm1d(6),
            block=block,
            act=nn.Tanh(),
            head=nn.Linear(6, 4),
        )
    )


def state_of_0_0_7(module: nn.Module, balance: list[int]) -> dict[str, Tensor]:
    """Return the state dict with the names of torchgpipe 0.0.7: the partition, then the layer's own name."""
    partition_of = [j for j, count in enumerate(balance) for _ in range(count)]
    place = {name: partition_of[k] for k, (name, _) in enumerate(module.named_children())}
    return {
        f"partitions.{place[name.split('.')[0]]}.{name}": x
        for name, x in module.state_dict().items()
    }


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize(
    "build", [layers, lambda: nn.Sequential(*layers())], ids=["named", "numbered"]
)
@pytest.mark.parametrize("balance", [[5], [2, 3], [2, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("made", [lambda model: model, copy.deepcopy], ids=["itself", "a copy"])
def test_a_state_of_0_0_7_loads(
    made: Any, balance: list[int], build: Callable[[], nn.Sequential], prefix: str
) -> None:
    saved = build()
    state = {prefix + name: x for name, x in state_of_0_0_7(saved, [1, 2, 2]).items()}
    before = dict(state)
    model = made(piped(build(), balance))
    whole = nn.ModuleDict({"backbone": model}) if prefix else model
    assert list(model.state_dict()) == list(saved.state_dict())
    assert differences(model.state_dict(), saved.state_dict()) != []
    whole.load_state_dict(state)
    assert differences(model.state_dict(), saved.state_dict()) == []
    assert differences(state, before) == [], "the caller's dictionary was changed"


def test_a_layer_called_partitions_keeps_its_name() -> None:
    model = piped(
        nn.Sequential(OrderedDict(partitions=nn.Sequential(nn.Sequential(nn.Linear(2, 2))))), [1]
    )
    state = {name: torch.ones_like(x) for name, x in model.state_dict().items()}
    assert "partitions.0.0.weight" in state
    model.load_state_dict(state)
    assert differences(model.state_dict(), state) == []


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = state_of_0_0_7(layers(), [3, 2])
    state["partitions.1.head.extra"] = state.pop("partitions.1.head.bias")
    with pytest.raises(RuntimeError, match=r"(?s)head\.bias.*head\.extra"):
        piped(layers(), [3, 2]).load_state_dict(state)
