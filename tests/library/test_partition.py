"""Partitions: what can be split, on which devices the parts go, and the names that their state keeps."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.partition import check_module, choose_devices, split, translate_old_state

CPU, META = torch.device("cpu"), torch.device("meta")
X = torch.ones(1)


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))


def one_layer_twice() -> nn.Sequential:
    layer = nn.Linear(1, 1)
    return nn.Sequential(OrderedDict(first=layer, between=nn.ReLU(), again=layer))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def having(change: Callable[[Any], object]) -> Callable[[], object]:
    """Return what makes a sequence and changes it."""

    def make() -> nn.Sequential:
        module = linears(1)
        change(module)
        return module

    return make


# What is given, the error, what it says.
NOT_WRAPPED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a module": (lambda: nn.Linear(1, 1), TypeError, "GPipe wraps an nn.Sequential, but got Linear"),
    "a list of layers": (lambda: [nn.Linear(1, 1)], TypeError, "GPipe wraps an nn.Sequential, but got list"),
    "a forward": (lambda: Residual(nn.ReLU()), TypeError, "layers of Residual one after another, but it has a method"),
    "another forward": (having(lambda m: setattr(m, "forward", torch.sin)), TypeError, "it has a forward of its own"),
    "parameters": (having(lambda m: m.register_parameter("p", nn.Parameter(X))), TypeError, "it has parameters of its"),
    "buffers": (having(lambda m: m.register_buffer("b", X)), TypeError, "it has buffers of its own"),
    "a hook": (having(lambda m: m.register_forward_hook(print)), TypeError, "it has hooks of its own, which would be"),
    "two of them": (
        having(lambda m: (m.register_buffer("b", X), m.register_full_backward_hook(print))),
        TypeError,
        "it has buffers and hooks of its own, which would be left out; put them into layers",
    ),
    "one layer twice": (
        one_layer_twice,
        ValueError,
        "layers 'first' and 'again' are the same module; a layer can be in one place only, "
        "so give each place a layer of its own",
    ),
}


@pytest.mark.parametrize("make, error, message", NOT_WRAPPED.values(), ids=NOT_WRAPPED)
def test_modules_that_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check_module(make())


def test_a_subclass_that_adds_nothing_is_accepted() -> None:
    check_module(type("Special", (nn.Sequential,), {})(nn.ReLU()))


# What is given, for how many partitions, and the devices that are chosen.
DEVICES: list[tuple[Any, int, list[torch.device]]] = [
    (["cpu", "meta"], 2, [CPU, META]),
    (["cpu", "cpu", "cpu"], 3, [CPU, CPU, CPU]),
    (["meta", "cpu", "cpu"], 2, [META, CPU]),
    (("meta",), 1, [META]),
    (iter([CPU, "meta"]), 2, [CPU, META]),
    ([], 0, []),
]


@pytest.mark.parametrize("given, n, chosen", DEVICES)
def test_devices(given: Any, n: int, chosen: list[torch.device]) -> None:
    assert choose_devices(given, n) == chosen


def test_devices_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_devices(None, 3) == [CPU] * 3

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices(None, 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(IndexError, match="too few devices: 3 partitions, but 2 devices"):
        choose_devices(None, 3)


def test_the_present_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    chosen = choose_devices(["cuda", "cuda:1", torch.device("cuda")], 3)
    assert chosen == [torch.device("cuda", 3), torch.device("cuda", 1), torch.device("cuda", 3)]


NO_DEVICES: list[tuple[Any, type[Exception], str]] = [
    (["cpu"], IndexError, "too few devices: 2 partitions, but 1 devices; give a balance of at most 1 partitions, or"),
    ([], IndexError, "too few devices: 2 partitions, but 0 devices"),
    ("cuda:0", TypeError, "devices must be a list of devices, one per partition, but got 'cuda:0'"),
    (CPU, TypeError, "devices must be a list of devices, one per partition, but got device(type='cpu')"),
    (0, TypeError, "devices must be a list of devices, one per partition, but got 0"),
]


@pytest.mark.parametrize("given, error, message", NO_DEVICES)
def test_devices_that_are_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        choose_devices(given, 2)


@given(balance=st.lists(st.integers(1, 4), max_size=5))
def test_consecutive_layers_with_their_names(balance: list[int]) -> None:
    # Among the names are some that a Sequential has attributes of.
    names = ["forward", "append", "pop", *map(str, range(20))][: sum(balance)]
    module = nn.Sequential()
    module._modules.update({name: nn.ReLU() for name in names})

    partitions = split(module, balance)

    assert [len(partition) for partition in partitions] == balance
    assert [item for partition in partitions for item in partition.named_children()] == list(module.named_children())


BALANCES: list[tuple[Any, type[Exception], str]] = [
    (None, ValueError, "balance is required: the number of layers of each partition"),
    (2, TypeError, "balance must be a list, the layers of each partition, but got 2"),
    ([1], ValueError, "the balance [1] sums up to 1 layers, but the module has 3"),
    ([2, 2], ValueError, "the balance [2, 2] sums up to 4 layers, but the module has 3"),
    ([], ValueError, "the balance [] sums up to 0 layers, but the module has 3"),
    ([3, 0], ValueError, "every partition needs one layer or more, but got the balance [3, 0]"),
    ([4, -1], ValueError, "every partition needs one layer or more, but got the balance [4, -1]"),
    ([1.5, 1.5], ValueError, "every partition needs one layer or more, but got the balance [1.5, 1.5]"),
]


@pytest.mark.parametrize("balance, error, message", BALANCES)
def test_balances_that_are_refused(balance: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        split(linears(3), balance)
    assert "from torchgpipe.balance import balance_by_time" in str(caught.value)


def test_the_advice_works() -> None:
    """The code in the message runs as it stands, but for the lines that the caller has."""
    with pytest.raises(ValueError, match="balance is required") as caught:
        split(linears(3), None)
    code = "\n".join(line.strip() for line in str(caught.value).split(":\n\n", 1)[1].splitlines())
    names: dict[str, Any] = {"GPipe": GPipe, "model": linears(3), "sample": torch.rand(2, 1)}

    exec(code.replace("...", 'devices=["cpu"] * partitions'), names)

    assert sum(names["model"].balance) == 3
    assert len(names["model"].partitions) == 2


def sharing() -> nn.Sequential:
    module = linears(4)
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("balance", [[2, 2], [1, 2, 1], [1, 1, 1, 1]], ids=str)
def test_a_parameter_on_two_devices_is_refused(balance: list[int]) -> None:
    message = (
        "'0.weight' and '2.weight' are one parameter, but would be on cpu and meta; "
        "choose a balance that keeps them in one partition, or give each a parameter of its own"
    )
    module = sharing()
    with pytest.raises(ValueError, match=re.escape(message)):
        GPipe(module, balance, devices=["cpu", *["meta"] * (len(balance) - 1)])
    assert {p.device for p in module.parameters()} == {CPU}, "a module that is refused has been moved"


@pytest.mark.parametrize("balance, devices", [([3, 1], ["cpu", "meta"]), ([1, 1, 2], ["cpu", "meta", "cpu"])])
def test_a_parameter_in_two_layers_on_one_device(balance: list[int], devices: list[str]) -> None:
    module = sharing()
    GPipe(module, balance, devices=devices)
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
    biases = [p.item() for name, p in model.named_parameters() if name.endswith("bias")]
    assert [round(bias / 100) for bias in biases] == [0, 1, 2, 3]
    again = GPipe(linears(4), [1, 3], devices=["cpu"] * 2, init=init)
    assert torch.equal(again[3].weight, model[3].weight)


# Prefix, key, key as it is loaded.
OLD_KEYS = [
    ("", "partitions.0.0.weight", "0.weight"),
    ("", "partitions.12.encoder.block.3.bias", "encoder.block.3.bias"),
    ("", "0.weight", "0.weight"),
    ("", "partitions.weight", "partitions.weight"),
    ("model.", "model.partitions.1.head.weight", "model.head.weight"),
    ("model.", "model_partitions.1.head.weight", "model_partitions.1.head.weight"),
    ("model.", "other.model.partitions.0.x", "other.model.partitions.0.x"),
    ("", "0.partitions.1.weight", "0.partitions.1.weight"),
]


@pytest.mark.parametrize("prefix, old, new", OLD_KEYS, ids=[f"{p}|{o}" for p, o, _ in OLD_KEYS])
def test_old_names_are_translated(prefix: str, old: str, new: str) -> None:
    state = {old: 1}
    translate_old_state(linears(1), state, prefix)
    assert state == {new: 1}
