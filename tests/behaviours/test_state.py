"""State: a pipeline's `state_dict` is the wrapped model's, 0.0.7's files load, and copies are independent."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.skip import Namespace

from ..parts import Pop, Stash
from ..plain import piped
from .compare import differences
from .row import step


def layers() -> nn.Sequential:
    module = nn.Sequential()
    module.add_module("stem", nn.Linear(5, 6))
    module.add_module("norm", nn.BatchNorm1d(6))
    module.add_module("block", nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6, bias=False)))
    namespace = Namespace()
    module.add_module("down", Stash().isolate(namespace))  # type: ignore[operator]
    module.add_module("up", Pop().isolate(namespace))  # type: ignore[operator]
    module.add_module("head", nn.Linear(6, 4))
    return module


balances = pytest.mark.parametrize("balance", [[6], [2, 4], [1, 3, 2], [2, 1, 1, 2]], ids=str)


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("deferred", [False, True])
@balances
def test_the_state_is_the_wrapped_models(balance: list[int], deferred: bool) -> None:
    module = layers()
    expected = copy.deepcopy(module.state_dict())
    model = piped(module, balance, deferred_batch_norm=deferred)
    assert list(model.state_dict()) == list(expected)
    assert same_state(model.state_dict(), expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in layers().named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in layers().named_buffers()]


def state_of_0_0_7(module: nn.Module, balance: list[int]) -> dict[str, Tensor]:
    """Return the state as torchgpipe 0.0.7 named it: by partition, and within by the layers' own names."""
    partition_of = [j for j, count in enumerate(balance) for _ in range(count)]
    place = {name: partition_of[k] for k, (name, _) in enumerate(module.named_children())}
    return {f"partitions.{place[name.split('.')[0]]}.{name}": x for name, x in module.state_dict().items()}


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("build", [layers, lambda: nn.Sequential(*layers())], ids=["named", "numbered"])
@balances
def test_a_state_of_0_0_7_loads(balance: list[int], build: Callable[[], nn.Sequential], prefix: str) -> None:
    saved = build()
    state = {prefix + name: x for name, x in state_of_0_0_7(saved, [1, 3, 2]).items()}
    before = dict(state)
    model = piped(build(), balance)
    whole = nn.ModuleDict({"backbone": model}) if prefix else model
    assert not same_state(model.state_dict(), saved.state_dict())
    whole.load_state_dict(state)
    assert same_state(model.state_dict(), saved.state_dict())
    assert same_state(state, before), "the caller's dictionary was changed"


def test_a_layer_called_partitions_keeps_its_name() -> None:
    model = piped(nn.Sequential(OrderedDict(partitions=nn.Sequential(nn.Sequential(nn.Linear(2, 2))))), [1])
    state = {name: torch.ones_like(x) for name, x in model.state_dict().items()}
    assert "partitions.0.0.weight" in state
    model.load_state_dict(state)
    assert same_state(model.state_dict(), state)


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = state_of_0_0_7(layers(), [3, 3])
    model = piped(layers(), [3, 3])
    state["partitions.1.head.extra"] = state.pop("partitions.1.head.bias")
    with pytest.raises(RuntimeError, match=r"(?s)head\.bias.*head\.extra"):
        model.load_state_dict(state)


COPIES: dict[str, Callable[[GPipe], GPipe]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_work_and_are_independent(duplicate: Callable[[GPipe], GPipe], used: bool, way: dict[str, Any]) -> None:
    model = piped(layers(), [2, 2, 2], **way)
    x = torch.randn(9, 5)
    if used:
        model(x).sum().backward()
        model.zero_grad()
    twin = duplicate(model)
    if isinstance(model, GPipe):
        for attribute in ("balance", "devices", "chunks", "checkpoint"):
            assert getattr(twin, attribute) == getattr(model, attribute)
        assert [[*partition.children()] for partition in twin.partitions] == [list(twin)[k : k + 2] for k in (0, 2, 4)]

    before = copy.deepcopy(model.state_dict())
    outcome = step(twin, x)
    gradients = [p.grad for p in twin.parameters()]
    buffers = copy.deepcopy([*twin.buffers()])
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert same_state(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    assert differences(outcome, step(model, x)) == []
    assert differences((gradients, buffers), ([p.grad for p in model.parameters()], [*model.buffers()])) == []

    # A copy reads old files too, and outlives its model.
    twin.load_state_dict(state_of_0_0_7(model, [3, 3]))
    expected = model.eval()(x)
    del model
    assert torch.equal(twin.eval()(x), expected)
