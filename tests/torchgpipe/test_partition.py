"""Partitions: what can be split, on which devices the parts go, and the names that their state keeps."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchgpipe.partition import check_module, choose_devices, split, translate_old_state

CPU, META = torch.device("cpu"), torch.device("meta")
X = torch.ones(1)
AUTOMATIC = "from torchgpipe.balance import balance_by_time"


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))


def one_layer_twice() -> nn.Sequential:
    layer = nn.Linear(1, 1)
    return nn.Sequential(OrderedDict(first=layer, between=nn.ReLU(), again=layer))


class Special(nn.Sequential):
    pass


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
    "a ModuleList": (lambda: nn.ModuleList(), TypeError, "GPipe wraps an nn.Sequential, but got ModuleList"),
    "nothing": (lambda: None, TypeError, "GPipe wraps an nn.Sequential, but got NoneType"),
    "a forward": (lambda: Residual(nn.ReLU()), TypeError, "layers of Residual one after another, but it has a for"),
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


@pytest.mark.parametrize(("make", "error", "message"), NOT_WRAPPED.values(), ids=NOT_WRAPPED.keys())
def test_modules_that_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check_module(make())


@pytest.mark.parametrize("module", [linears(0), linears(3), Special(nn.ReLU())], ids=["empty", "some", "subclass"])
def test_modules_that_are_accepted(module: nn.Sequential) -> None:
    check_module(module)


class TestDevices:
    @pytest.mark.parametrize(
        ("given", "n", "chosen"),
        [
            (["cpu"], 1, [CPU]),
            (["cpu", "meta"], 2, [CPU, META]),
            (["cpu", "cpu", "cpu"], 3, [CPU, CPU, CPU]),
            (["meta", "cpu", "cpu"], 2, [META, CPU]),
            ([CPU, "meta"], 2, [CPU, META]),
            (("meta",), 1, [META]),
            (iter(["cpu", "meta"]), 2, [CPU, META]),
            ([], 0, []),
        ],
        ids=str,
    )
    def test_given(self, given: Any, n: int, chosen: list[torch.device]) -> None:
        assert choose_devices(given, n) == chosen

    def test_without_cuda_the_default_is_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert choose_devices(None, 3) == [CPU] * 3

    def test_with_cuda_the_default_is_all_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

        assert choose_devices(None, 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
        with pytest.raises(IndexError, match="too few devices: 3 partitions, but 2 devices"):
            choose_devices(None, 3)

    def test_numbers_are_cuda_devices_and_the_present_one_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        chosen = choose_devices(["cuda", "cuda:1", torch.device("cuda")], 3)
        assert chosen == [torch.device("cuda", 3), torch.device("cuda", 1), torch.device("cuda", 3)]

    @pytest.mark.parametrize(
        ("given", "n", "message"),
        [
            (["cpu"], 2, "too few devices: 2 partitions, but 1 devices; give a balance of at most 1 partitions"),
            ([], 1, "too few devices: 1 partitions, but 0 devices"),
            (["cpu", "meta"], 4, "or name a device several times in devices=[…]"),
        ],
    )
    def test_too_few(self, given: list[str], n: int, message: str) -> None:
        with pytest.raises(IndexError, match=re.escape(message)):
            choose_devices(given, n)

    @pytest.mark.parametrize("given", ["cpu", "cuda:0", CPU, 0], ids=repr)
    def test_a_device_instead_of_a_list(self, given: Any) -> None:
        message = f"devices must be a list of devices, one per partition, but got {given!r}"
        with pytest.raises(TypeError, match=re.escape(message)):
            choose_devices(given, 1)


class TestSplit:
    @settings(deadline=None)
    @given(balance=st.lists(st.integers(1, 4), max_size=5))
    def test_consecutive_layers_with_their_names(self, balance: list[int]) -> None:
        module = nn.Sequential(OrderedDict((f"layer {k}", nn.ReLU()) for k in range(sum(balance))))

        counts, partitions, devices = split(module, balance, ["cpu"] * len(balance))

        assert counts == balance
        assert [len(partition) for partition in partitions] == balance
        assert devices == [CPU] * len(balance)
        named = [item for partition in partitions for item in partition.named_children()]
        assert named == list(module.named_children())

    def test_names_that_a_sequential_has_attributes_of(self) -> None:
        module = nn.Sequential()
        for name in ("forward", "append", "pop"):
            module._modules[name] = nn.ReLU()

        _, partitions, _ = split(module, [2, 1], ["cpu", "cpu"])

        assert [list(partition._modules) for partition in partitions] == [["forward", "append"], ["pop"]]

    def test_layers_go_to_their_devices(self) -> None:
        module = linears(3)

        _, partitions, _ = split(module, [1, 2], ["cpu", "meta"])

        assert [{p.device for p in partition.parameters()} for partition in partitions] == [{CPU}, {META}]

    @pytest.mark.parametrize("training", [True, False])
    def test_the_mode_is_kept(self, training: bool) -> None:
        module = linears(2).train(training)
        _, partitions, _ = split(module, [1, 1], ["cpu", "cpu"])
        assert [partition.training for partition in partitions] == [training, training]

    @pytest.mark.parametrize(
        ("balance", "message"),
        [
            (None, "balance is required: the number of layers of each partition"),
            ([1], "the balance [1] sums up to 1 layers, but the module has 3"),
            ([2, 2], "the balance [2, 2] sums up to 4 layers, but the module has 3"),
            ([], "the balance [] sums up to 0 layers, but the module has 3"),
            ([3, 0], "every partition needs one layer or more, but got the balance [3, 0]"),
            ([4, -1], "every partition needs one layer or more, but got the balance [4, -1]"),
            ([1.5, 1.5], "every partition needs one layer or more, but got the balance [1.5, 1.5]"),
        ],
        ids=str,
    )
    def test_balances_that_do_not_fit(self, balance: Any, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            split(linears(3), balance, ["cpu"] * 4)

        assert AUTOMATIC in str(caught.value)

    def test_the_advice_works(self) -> None:
        """The code in the message runs as it stands, but for the lines that the caller has."""
        from torchgpipe import GPipe

        with pytest.raises(ValueError, match="balance is required") as caught:
            split(linears(3), None, None)
        code = str(caught.value).split(":\n\n", 1)[1]
        code = "\n".join(line.strip() for line in code.splitlines())
        code = code.replace("...", 'devices=["cpu"] * partitions')
        names: dict[str, Any] = {"GPipe": GPipe, "model": linears(3), "sample": torch.rand(2, 1)}

        exec(code, names)

        assert sum(names["model"].balance) == 3
        assert len(names["model"].partitions) == 2


def sharing() -> nn.Sequential:
    module = linears(4)
    module[2].weight = module[0].weight
    return module


class TestSharedParameters:
    @pytest.mark.parametrize("balance", [[2, 2], [1, 2, 1], [1, 1, 1, 1]], ids=str)
    def test_on_two_devices(self, balance: list[int]) -> None:
        devices = ["cpu", *["meta"] * (len(balance) - 1)]
        message = (
            "'0.weight' and '2.weight' are one parameter, but would be on cpu and meta; "
            "choose a balance that keeps them in one partition, or give each a parameter of its own"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            split(sharing(), balance, devices)

    def test_a_refused_module_is_left_where_it_is(self) -> None:
        module = sharing()
        with pytest.raises(ValueError, match="are one parameter"):
            split(module, [2, 2], ["cpu", "meta"])
        assert {p.device for p in module.parameters()} == {CPU}

    @pytest.mark.parametrize(
        ("balance", "devices"),
        [([3, 1], ["cpu", "meta"]), ([4], ["cpu"]), ([2, 2], ["cpu", "cpu"]), ([1, 1, 2], ["cpu", "meta", "cpu"])],
        ids=str,
    )
    def test_on_one_device(self, balance: list[int], devices: list[str]) -> None:
        module = sharing()
        _, partitions, _ = split(module, balance, devices)
        assert module[2].weight is module[0].weight
        assert sum(len(partition) for partition in partitions) == 4


# Prefix, key, key as it is loaded.
OLD_KEYS = [
    ("", "partitions.0.0.weight", "0.weight"),
    ("", "partitions.12.encoder.block.3.bias", "encoder.block.3.bias"),
    ("", "0.weight", "0.weight"),
    ("", "partitions.weight", "partitions.weight"),
    ("model.", "model.partitions.1.head.weight", "model.head.weight"),
    ("model.", "partitions.1.head.weight", "partitions.1.head.weight"),
    ("model.", "model_partitions.1.head.weight", "model_partitions.1.head.weight"),
    ("model.", "other.model.partitions.0.x", "other.model.partitions.0.x"),
    ("", "0.partitions.1.weight", "0.partitions.1.weight"),
]


@pytest.mark.parametrize(("prefix", "old", "new"), OLD_KEYS, ids=[f"{p}|{o}" for p, o, _ in OLD_KEYS])
def test_old_names_are_translated(prefix: str, old: str, new: str) -> None:
    state = {old: 1}
    translate_old_state(linears(1), state, prefix)
    assert state == {new: 1}


def test_a_layer_may_be_called_partitions() -> None:
    module = nn.Sequential(OrderedDict(partitions=nn.Sequential(nn.Linear(1, 1))))
    state = {"partitions.0.weight": 1}
    translate_old_state(module, state, "")
    assert state == {"partitions.0.weight": 1}
