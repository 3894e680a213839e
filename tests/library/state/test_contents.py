"""Test which values a saved state may contain, and into which models it may be loaded."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Sequential
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

from torchgpipe import GPipe
from torchgpipe.state import saved_files
from torchgpipe.state.optimizers import same
from torchgpipe.state.saves import Saves

from ...behaviours.compare import differences


def piped(*layers: Linear) -> GPipe:
    return GPipe(Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers))


def two_layers(seed: int) -> GPipe:
    torch.manual_seed(seed)
    return piped(Linear(4, 4), Linear(4, 4))


def two_optimizers(model: GPipe) -> list[Optimizer]:
    first, second = model[:]
    return [SGD(first.parameters(), 0.1, momentum=0.9), Adam(second.parameters())]


def train(model: GPipe, optimizers: list[Optimizer], steps: int) -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4)
    for _ in range(steps):
        model.step(mse_loss, x, x.square())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_training_with_several_optimizers_goes_on(tmp_path: Path) -> None:
    model = two_layers(0)
    optimizers = two_optimizers(model)
    train(model, optimizers, 2)
    Saves(tmp_path).save(2, model, optimizers)
    again = two_layers(1)
    theirs = two_optimizers(again)
    Saves(tmp_path).load(again, theirs[::-1])
    train(model, optimizers, 2)
    train(again, theirs, 2)
    assert differences(again.state_dict(), model.state_dict()) == []


def exchanged(model: GPipe) -> Any:
    first, second = model[:]
    return [SGD(second.parameters(), 0.1, momentum=0.9), Adam(first.parameters())]


def with_a_parameter_twice(model: GPipe) -> Any:
    return [Adam(model.parameters()), SGD(model[1].parameters(), 0.1)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (exchanged, ValueError, "the optimizer Adam for 1.weight, not with SGD"),
        (with_a_parameter_twice, ValueError, "two optimizers have the parameter 1.bias"),
        (lambda model: "Adam", TypeError, "a torch.optim.Optimizer, a list of these, or None.*str"),
    ],
)
def test_other_optimizers_are_refused(
    make: Callable[[GPipe], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = two_layers(0)
    Saves(tmp_path).save(0, model, two_optimizers(model))
    with pytest.raises(error, match=message):
        Saves(tmp_path).load(model, make(model))


class Growing(Linear):
    """A layer whose extra state (`get_extra_state`) becomes longer with each call of the layer."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Tensor:
        return torch.arange(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = len(state)


def test_extra_state_may_change_its_size(tmp_path: Path) -> None:
    model = piped(Growing(4, 4), Growing(4, 4))
    train(model, [], 3)
    Saves(tmp_path).save(0, model, None)
    again = piped(Growing(4, 4), Growing(4, 4))
    Saves(tmp_path).load(again, None)
    assert [layer.calls for layer in again[:]] == [3, 3]


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "compressed": Tensor.to_sparse_csr,
    "eight bits": lambda x: x.to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_tensors_of_any_layout_and_type(name: str, tmp_path: Path) -> None:
    """Check that tensors of unusual layouts and dtypes are saved, also as additional values."""
    convert = CONVERSIONS[name]

    def with_buffer(x: Tensor) -> GPipe:
        model = two_layers(0)
        model[1].register_buffer("buffer", x)
        return model

    x = convert(torch.eye(3))
    Saves(tmp_path).save(0, with_buffer(x), None, given=x)
    again = with_buffer(convert(torch.eye(3) * 2))
    found = Saves(tmp_path).load(again, None)
    assert found is not None
    for loaded in (again[1].buffer, found["given"]):
        torch.testing.assert_close(loaded, x, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("entries", [1, 9])
def test_a_compressed_buffer_may_have_another_number_of_entries(
    entries: int, tmp_path: Path
) -> None:
    x = torch.eye(3).to_sparse_csr()
    model, again = two_layers(0), two_layers(0)
    model[1].register_buffer("buffer", x)
    Saves(tmp_path).save(0, model, None)
    other = (torch.arange(9).view(3, 3) < entries).float().to_sparse_csr()
    again[1].register_buffer("buffer", other)
    Saves(tmp_path).load(again, None)
    assert again[1].buffer is other
    torch.testing.assert_close(other, x, rtol=0, atol=0)


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock(), {"a": (x for x in "bc")}])
def test_a_value_that_cannot_be_pickled_is_named(value: Any, tmp_path: Path) -> None:
    model = two_layers(0)
    saves = Saves(tmp_path)
    with pytest.raises(TypeError, match=r"scheduler cannot be saved.*cannot be pickled"):
        saves.save(0, model, None, step_size=3, scheduler=value)
    assert saves.load(model, None) is None


def test_plain_layers_load_a_state(tmp_path: Path) -> None:
    model = two_layers(0)
    optimizer = Adam(model.parameters())
    train(model, [optimizer], 2)
    Saves(tmp_path).save(2, model, optimizer)
    plain = Sequential(Linear(4, 4), Linear(4, 4))
    theirs = Adam(plain.parameters())
    assert Saves(tmp_path).load(plain, theirs) == {"step": 2}
    assert differences(plain.state_dict(), model.state_dict()) == []
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert differences(theirs.state[p], optimizer.state[q]) == []


def test_a_reader_looks_again_if_its_state_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a load gets the new state if a save removes the old state during the load.

    With `keep=1`, each save removes the state before it.
    """
    model, reader = two_layers(0), two_layers(1)
    saves = Saves(tmp_path, keep=1)
    saves.save(0, model, None)
    check = saved_files.check
    checked = []

    def save_meanwhile(path: Path, ranks: Any) -> dict[str, int]:
        checked.append(path.name)
        if len(checked) == 1:
            saves.save(1, model, None)
        return check(path, ranks)

    monkeypatch.setattr("torchgpipe.state.saves.check", save_meanwhile)
    assert Saves(tmp_path).load(reader, None) == {"step": 1}
    assert checked == ["000001-step-0", "000002-step-1"]
    assert differences(reader.state_dict(), model.state_dict()) == []


NAN = torch.tensor([1.0, torch.nan])
SAME: list[tuple[Any, Any, bool]] = [
    (NAN, NAN.clone(), True),
    (NAN, NAN.double(), False),
    (NAN, torch.ones(2), False),
    (torch.nan, torch.nan, True),
    ({"a": [1, NAN]}, {"a": [1, NAN.clone()]}, True),
    ({"a": [1, NAN]}, {"a": [2, NAN]}, False),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
    (1, 1.0, False),
]


@pytest.mark.parametrize(("x", "y", "expected"), SAME)
def test_same(x: Any, y: Any, expected: bool) -> None:
    assert same(x, y) == expected
