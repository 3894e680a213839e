"""Test which arguments `GPipe` refuses. Each error says what was given and what to do instead."""

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, ReLU, Sequential
from torch.nn.functional import mse_loss

from torchgpipe import GPipe
from torchgpipe.layers.checks import check_module
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import split

from .layers import linears
from .test_gpipe import CPU, made

ONE = torch.ones(1)
CHUNKS = "chunks must be a whole number of at least 1, but got"
MODES = "checkpoint must be one of 'always', 'except_last', 'never', but got"
MOVED = (
    "and cannot be moved; name the devices when wrapping the module: "
    "GPipe(module, balance, devices="
)


def checked(change: Callable[[Any], object]) -> None:
    """Call `check_module` on a changed `nn.Sequential`."""
    module = linears(1)
    change(module)
    check_module(module)


def changed(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda _: checked(change)


def devices_by_place() -> None:
    GPipe(linears(2), [1, 1], ["cpu"] * 2)  # type: ignore[call-arg]


def set_forward(module: Module) -> None:
    module.forward = torch.sin


def add_parameter(module: Module) -> None:
    module.register_parameter("p", Parameter(ONE))


def add_buffer_and_hook(module: Module) -> None:
    module.register_buffer("b", ONE)
    module.register_forward_hook(print)


def called_in_a_task(where: str) -> Callable[[Any], object]:
    """Return a function that trains a pipeline in which a hook of a layer calls the pipeline."""

    def use(_: Any) -> object:
        model = made(engine="workers", chunks=2, schedule="1F1B")
        register = getattr(model[0], where)
        register(lambda *_: model.predict(torch.ones(4, 2)))
        x = torch.ones(4, 2, requires_grad=True)
        return model.step(mse_loss, x, torch.ones(4, 2))

    return use


def trained_with_a_module_beside(model: Any) -> object:
    model.criterion = torch.nn.MSELoss()
    return model(torch.ones(4, 2))


class Residual(Sequential):
    """An `nn.Sequential` that overrides `forward`."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


LAYER = Linear(1, 1)
ONE_TWICE = Sequential(OrderedDict(first=LAYER, between=ReLU(), again=LAYER))
check: Any = check_module
chosen: Any = choose_devices
parts: Any = split
LAYERS = linears(3)
AUTO = "one of 'auto', 'graph', 'workers', but got 'inline'"
ON_CPUS = "is for CPU devices, but got ['cpu', 'm"
NO_TENSORS = "input must be a tensor or a tuple of tensors, but got list"
OF_RESIDUAL = "layers of Residual one after another, but it has a method"
TWICE = "layers 'first' and 'again' are the same module, but a layer "
TOO_FEW = "2 partitions, but 1 device; give a balance of at most 1 partition,"
NO_LIST = "a list of devices, one per partition, such as ['cuda:0', 'cuda:1'], but got "
NUMBERS = (
    "balance must be a list with the number of layers of each partition, such as [2, 3], but got "
)
BESIDE = "the pipeline has a module 'criterion' that is none of its layers; keep modules such as "
IN_A_TASK = "calls the pipeline in the middle of a task; call it after the step"
WRONG_SUM = "the balance [1] sums up to 1 layers, but the module has 3"
NONE_IN_ONE = "one layer or more, but got the balance [3, 0]"
# A call, the error's type, and a part of the error's message.
REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda _: made(engine="inline"), ValueError, AUTO),
    (lambda _: made(engine="workers", devices=["cpu", "meta"]), ValueError, ON_CPUS),
    (lambda _: devices_by_place(), TypeError, "positional argument"),
    (lambda model: model([torch.rand(2, 2)]), TypeError, NO_TENSORS),
    (lambda model: model.cuda(device=torch.device("cuda", 1)), TypeError, MOVED),
    (lambda model: model.to("cuda:0"), TypeError, MOVED),
    (lambda _: check([LAYER]), TypeError, "GPipe wraps an nn.Sequential, but got list"),
    (lambda _: check(Residual()), TypeError, OF_RESIDUAL),
    (changed(set_forward), TypeError, "it has a forward of its own"),
    (changed(add_parameter), TypeError, "it has parameters of its own"),
    (
        changed(lambda m: m.register_full_backward_hook(print)),
        TypeError,
        "it has hooks of its own, which would",
    ),
    (changed(add_buffer_and_hook), TypeError, "it has buffers and h"),
    (lambda _: check(ONE_TWICE), ValueError, TWICE),
    (lambda _: chosen(["cpu"], 2), IndexError, TOO_FEW),
    (lambda _: chosen("cuda:0", 2), TypeError, f"{NO_LIST}'cuda:0'"),
    (lambda _: chosen(0, 2), TypeError, f"{NO_LIST}0"),
    (trained_with_a_module_beside, RuntimeError, BESIDE),
    (called_in_a_task("register_forward_hook"), RuntimeError, IN_A_TASK),
    (called_in_a_task("register_full_backward_hook"), RuntimeError, IN_A_TASK),
    (lambda _: parts(LAYERS, 2), TypeError, NUMBERS + "2"),
    (lambda _: parts(LAYERS, [1]), ValueError, WRONG_SUM),
    (lambda _: parts(LAYERS, [3, 0]), ValueError, NONE_IN_ONE),
    (lambda _: parts(LAYERS, [1.5, 1.5]), TypeError, NUMBERS + "[1.5, 1.5]"),
    (lambda _: parts(LAYERS, "12"), TypeError, NUMBERS + "'12'"),
    (lambda _: parts(LAYERS, torch.tensor([1, 2])), TypeError, NUMBERS + "tensor([1, 2])"),
]


@pytest.mark.parametrize("do, error, message", REFUSED)
def test_refused(do: Callable[[Any], object], error: type[Exception], message: str) -> None:
    model = made()
    with pytest.raises(error, match=re.escape(message)):
        do(model)
    for parameter in model.parameters():
        assert parameter.device == CPU
        assert parameter.dtype == torch.float32


WRONG_CHUNKS = [("chunks", value, CHUNKS) for value in (0, True, 1.5, "8")]
WRONG_MODES = [("checkpoint", value, MODES) for value in ("sometimes", True)]


@pytest.mark.parametrize("name, value, message", [*WRONG_CHUNKS, *WRONG_MODES])
def test_settings_are_checked_also_where_they_are_changed_later(
    name: str, value: Any, message: str
) -> None:
    told = f"{message} {value!r}"
    with pytest.raises(ValueError, match=told):
        made(**{name: value})
    model = made()
    setattr(model, name, value)
    with pytest.raises(ValueError, match=told):
        model(torch.ones(1, 2))
