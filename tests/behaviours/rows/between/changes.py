"""Test cases in which a model, its input or the random state changes between forward and backward.

Some changes must have no effect. For others, the pipeline must raise an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ...parts.layers import WIDTH, Do, frozen_linear, linear
from ...row import Row, amid

Change = Callable[[Any, Tensor], object]


# Layers.


def norm_then_linear(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.linear(self.norm(x)).tanh()
    return y


def block() -> nn.Module:
    """Return a layer that contains a norm and a linear layer. Some test cases replace these two."""
    return Do(norm_then_linear, norm=nn.LayerNorm(WIDTH), linear=linear())


def triple_output(_: nn.Module, __: Any, y: Tensor) -> Tensor:
    return 3 * y


def layers(last: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    dropout = nn.Dropout(0.0)
    dropout.register_forward_hook(triple_output)
    return nn.Sequential(linear(), dropout, block(), last())


def norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH)


def frozen_norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH).eval()


def times_constant(self: Any, x: Tensor) -> Tensor:
    return x * self.by.clone()


def scale() -> nn.Module:
    return Do(times_constant, by=torch.full((1,), 2.0))


# Harmless changes.


def evaluate_last(run: Any, _: Tensor) -> None:
    run[3].eval()


def train_last(run: Any, _: Tensor) -> None:
    run[3].train()


def fill_constant(run: Any, _: Tensor) -> None:
    run[3].by.fill_(7)


def replace_constant(run: Any, _: Tensor) -> None:
    run[3].by = torch.full((1,), 7.0)


def replace_parameter(run: Any, _: Tensor) -> None:
    run[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def replace_data(run: Any, _: Tensor) -> None:
    run[0].weight.data = torch.zeros(WIDTH, WIDTH)


def freeze_parameter(run: Any, _: Tensor) -> None:
    run[0].weight.requires_grad_(False)


def seed(*_: Any) -> None:
    torch.manual_seed(3)


def remove_hooks(run: Any, _: Tensor) -> None:
    run[1]._forward_hooks.clear()


def double_output(_: nn.Module, __: Any, y: Tensor) -> Tensor:
    return 2 * y


def double_input(_: nn.Module, args: Any) -> tuple[Tensor]:
    return (2 * args[0],)


def add_hook(run: Any, _: Tensor) -> None:
    run[2].register_forward_hook(double_output)


def add_pre_hook(run: Any, _: Tensor) -> None:
    run[2].register_forward_pre_hook(double_input)


def write_on_last(run: Any, _: Tensor) -> None:
    run[3].calls = 5


HARMLESS: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "evaluation of one layer": (norm, evaluate_last),
    "training of a frozen norm": (frozen_norm, train_last),
    "a constant": (scale, fill_constant),
    "a constant that is replaced": (scale, replace_constant),
    "a parameter that is replaced": (nn.Tanh, replace_parameter),
    "a parameter's data": (nn.Tanh, replace_data),
    "a parameter that is frozen": (nn.Tanh, freeze_parameter),
    "random numbers": (nn.Tanh, seed),
    "a forward hook removed": (nn.LeakyReLU, remove_hooks),
    "a forward hook added": (nn.LeakyReLU, add_hook),
    "a forward pre-hook": (nn.LeakyReLU, add_pre_hook),
    "what a tool writes on a layer": (nn.LeakyReLU, write_on_last),
}
"""Changes that have no effect, and for each change the last layer of the model."""


# Changes that are refused.


def change_parameter(run: Any, _: Tensor) -> None:
    run[0].weight.detach().add_(1)


def change_frozen(run: Any, _: Tensor) -> None:
    run[3].weight.add_(1)


def change_input(_: Any, x: Tensor) -> None:
    x.detach().add_(1)


def replace_norm(run: Any, _: Tensor) -> None:
    run[2].norm = nn.Identity()


def add_adapter(run: Any, _: Tensor) -> None:
    run[2].adapter = linear()


def parametrize_inside(run: Any, _: Tensor) -> None:
    parametrizations.weight_norm(run[2].linear)


def change_setting(run: Any, _: Tensor) -> None:
    run[3].negative_slope = 5.0


SLOPE = "'negative_slope' of LeakyReLU"
REFUSED: dict[str, tuple[Callable[[], nn.Module], Change, str]] = {
    "a parameter changed": (nn.Tanh, change_parameter, "'weight'"),
    "a frozen parameter changed": (frozen_linear, change_frozen, "'weight'"),
    "the input changed": (nn.Tanh, change_input, "input of partition 0"),
    "an inner layer": (nn.Tanh, replace_norm, "was replaced"),
    "an adapter": (nn.Tanh, add_adapter, "was replaced, added"),
    "a parametrization": (nn.Tanh, parametrize_inside, "was replaced"),
    "a setting of a layer": (nn.LeakyReLU, change_setting, SLOPE),
}
"""For each change that raises an error: the model's last layer, the change, and the error.

The recomputation raises the error, or autograd raises it like without a pipeline.
"""

ROWS: list[Row] = []
for what, (last, change) in HARMLESS.items():
    ROWS.append(Row(what, partial(layers, last), balance=(2, 2), use=amid(change)))
for what, (last, change, error) in REFUSED.items():
    row = Row(
        what,
        partial(layers, last),
        balance=(2, 2),
        use=amid(change),
        refused={"always": error, "except_last": f"{error}|modified by an inplace operation"},
        without={"never": "then autograd alone decides"},
    )
    ROWS.append(row)
