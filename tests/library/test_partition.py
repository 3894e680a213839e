"""Partitions: which modules can be split, and their devices. Names in state dicts are tested in tests/behaviours."""

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.partition import check_module, choose_devices, split

from .layers import linears

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), [torch.device("cuda", k) for k in range(3)]
X = torch.ones(1)


def changed(change: Callable[[Any], object]) -> Callable[[], object]:
    """Return a function that changes a sequence of layers, and then checks it."""

    def check() -> None:
        module = linears(1)
        change(module)
        check_module(module)

    return check


LAYER = nn.Linear(1, 1)
ONE_TWICE = nn.Sequential(OrderedDict(first=LAYER, between=nn.ReLU(), again=LAYER))
RESIDUAL: Any = type("Residual", (nn.Sequential,), {"forward": torch.sin})()
chosen: Any = choose_devices
parts: Any = split

# The call, the error's type, its message.
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: check_module([nn.Linear(1, 1)]), TypeError, "GPipe wraps an nn.Sequential, but got list"),
    (lambda: check_module(RESIDUAL), TypeError, "layers of Residual one after another, but it has a method"),
    (changed(lambda m: setattr(m, "forward", torch.sin)), TypeError, "it has a forward of its own"),
    (changed(lambda m: m.register_parameter("p", nn.Parameter(X))), TypeError, "it has parameters of its own"),
    (changed(lambda m: m.register_full_backward_hook(print)), TypeError, "it has hooks of its own, which would"),
    (changed(lambda m: (m.register_buffer("b", X), m.register_forward_hook(print))), TypeError, "it has buffers and h"),
    (lambda: check_module(ONE_TWICE), ValueError, "layers 'first' and 'again' are the same module; a layer "),
    (lambda: chosen(["cpu"], 2), IndexError, "2 partitions, but 1 devices; give a balance of at most 1 parti"),
    (lambda: chosen("cuda:0", 2), TypeError, "a list of devices, one per partition, but got 'cuda:0'"),
    (lambda: chosen(0, 2), TypeError, "a list of devices, one per partition, but got 0"),
    (lambda: parts(linears(3), 2), TypeError, "balance must be a list, the layers of each partition, but got 2"),
    (lambda: parts(linears(3), [1]), ValueError, "the balance [1] sums up to 1 layers, but the module has 3"),
    (lambda: parts(linears(3), [3, 0]), ValueError, "one layer or more, but got the balance [3, 0]"),
    (lambda: parts(linears(3), [1.5, 1.5]), ValueError, "one layer or more, but got the balance [1.5, 1.5]"),
]


@pytest.mark.parametrize("do, error, message", REFUSED)
def test_refused(do: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        do()


def test_a_subclass_that_adds_nothing_is_accepted() -> None:
    check_module(type("Special", (nn.Sequential,), {})(nn.ReLU()))


# The argument `devices`, the number of partitions, the chosen devices if there are three CUDA devices.
DEVICES: list[tuple[Any, int, list[torch.device]]] = [
    (None, 2, [CUDA[0], CUDA[1]]),
    (["meta", "cpu", "cpu"], 2, [META, CPU]),
    (iter([CPU, "meta"]), 2, [CPU, META]),
    (["cuda", "cuda:1", torch.device("cuda")], 3, [CUDA[2], CUDA[1], CUDA[2]]),
    ([], 0, []),
]


@pytest.mark.parametrize("given, n, chosen", DEVICES)
def test_devices(given: Any, n: int, chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert choose_devices(given, n) == chosen
    with pytest.raises(IndexError, match="too few devices: 4 partitions, but 3 devices"):
        choose_devices(None, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_devices(None, 4) == [CPU] * 4


def test_names_of_layers_may_be_those_of_attributes() -> None:
    module = nn.Sequential()
    module._modules.update(forward=nn.ReLU(), append=nn.Tanh(), pop=nn.ReLU())
    one, other = split(module, [1, 2])
    assert [*one.named_children(), *other.named_children()] == [*module.named_children()]
    assert (len(one), len(other)) == (1, 2)


def test_the_advice_works() -> None:
    """The code in the message runs unchanged, given the caller's own variables."""
    with pytest.raises(ValueError, match="balance is required") as caught:
        split(linears(3), None)
    code = "\n".join(line.strip() for line in str(caught.value).split(":\n\n", 1)[1].splitlines())
    names: dict[str, Any] = {"GPipe": GPipe, "model": linears(3), "sample": torch.rand(2, 2)}

    exec(code.replace("...", 'devices=["cpu"] * partitions'), names)

    assert sum(names["model"].balance) == 3
    assert len(names["model"].partitions) == 2


def sharing() -> nn.Sequential:
    module = linears(4)
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("balance", [[2, 2], [1, 2, 1]], ids=str)
def test_a_parameter_on_two_devices_is_refused(balance: list[int]) -> None:
    module = sharing()
    message = "'0.weight' and '2.weight' are one parameter, but would be on cpu and meta; choose a balance that keeps"
    with pytest.raises(ValueError, match=message):
        GPipe(module, balance, devices=["cpu", *["meta"] * (len(balance) - 1)])
    assert {p.device for p in module.parameters()} == {CPU}, "a module that is refused has been moved"
    GPipe(module, [1, 1, 2], devices=["cpu", "meta", "cpu"])
    assert module[2].weight is module[0].weight


def test_layers_on_meta_get_memory_and_values() -> None:
    with torch.device("meta"):
        module = sharing()
    with pytest.raises(ValueError, match=r"'0.weight' is on device 'meta' and has no values: give init="):
        GPipe(module, [2, 2], devices=["cpu"] * 2)

    def init(k: int, layer: nn.Module) -> None:
        for p in layer.parameters():
            p.normal_(mean=100.0 * k)

    before = torch.get_rng_state()
    model = GPipe(module, [2, 2], devices=["cpu"] * 2, init=init)
    assert torch.equal(torch.get_rng_state(), before)
    assert model[2].weight is model[0].weight
    biases = [p.mean().item() for name, p in model.named_parameters() if name.endswith("bias")]
    assert [round(bias / 100) for bias in biases] == [0, 1, 2, 3]
    again = GPipe(linears(4), [1, 3], devices=["cpu"] * 2, init=init)
    assert torch.equal(again[3].weight, model[3].weight)
