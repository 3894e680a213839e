"""Kinds of layers for randomly generated test models.

Each kind does something that a pipeline could get wrong. Inputs and outputs have the shape `(N,
WIDTH)`, and some layers take or return tuples of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import BatchNorm1d, InstanceNorm1d, Parameter, utils
from torch.nn.utils import parametrizations, prune

from .draw import Draw
from .layers import (
    WIDTH,
    Do,
    Pair,
    checkpointed,
    draw_from,
    frozen_linear,
    linear,
    norm,
    tied,
    weight,
)
from .wiring import merge

Two = tuple[Tensor, Tensor]
Make = Callable[[Any], nn.Module]
"""A function that builds a layer, given the `shared_parts()` of the model."""


def own(make: Callable[..., Any], *args: Any, **options: Any) -> Make:
    """Return a function that builds a layer which shares no module with other layers.

    The returned function calls `make(*args, **options)`. Like all functions in `KINDS`, it takes
    one argument, the modules that several layers can share, but does not use these modules.
    """
    return lambda parts: make(*args, **options)


def weighted(function: Callable[[Any, Tensor], Any]) -> Make:
    return lambda parts: Do(function, weight=weight())


class Frozen(BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


# Functions of one tensor.


def view(_: Any, x: Tensor) -> Tensor:
    return x.view_as(x)


def strided(_: Any, x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


def squares(self: Any, x: Tensor) -> Tensor:
    return x * x * self.weight + x


def constant(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.weight.expand(len(x), -1)
    return y


def detached(_: Any, x: Tensor) -> Tensor:
    return x.detach()


def half_detached(_: Any, x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * x.detach()


def new_leaf(_: Any, x: Tensor) -> Tensor:
    return x.detach().requires_grad_(torch.is_grad_enabled())


def hooked(_: Any, x: Tensor) -> Tensor:
    y = 1 * x
    if y.requires_grad:
        y.register_hook(lambda grad: 2 * grad)
    return y


def differentiated(self: Any, x: Tensor) -> Tensor:
    if torch.is_inference_mode_enabled():
        return x
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = 1 * x if again and x.requires_grad else x.detach().requires_grad_()
        loss = (x.sin() * self.weight).sum()
        return torch.autograd.grad(loss, x, create_graph=again)[0]


def mapped(self: Any, x: Tensor) -> Any:
    def sine(row: Tensor) -> Any:
        return row.sin() * self.weight

    return torch.vmap(sine)(x)


def doubled(self: Any, x: Tensor) -> Tensor:
    weights = {name: 2 * p for name, p in self.inner.named_parameters()}
    return torch.func.functional_call(self.inner, weights, (x,))


def borrowing(self: Any, x: Tensor) -> Tensor:
    y: Tensor = x @ self.borrowed[0].weight
    return y


def one_step(self: Any, x: Tensor) -> Tensor:
    y, _ = self.lstm(x.unsqueeze(1))
    result: Tensor = y.squeeze(1)
    return result


def as_weights(self: Any, x: Tensor) -> Tensor:
    return x * self.weight * (2 if self.weight.requires_grad else 3)


def as_things_are(_: Any, x: Tensor) -> Tensor:
    """Return the tanh of the input, times a factor that depends on how the layer is called.

    The factor changes with the input's attributes `scale` and `requires_grad`, and with PyTorch's
    default device and dtype. So an output is wrong if a pipeline does not keep one of these.
    """
    given = getattr(x, "scale", 2) * (3 if x.requires_grad else 4)
    device = torch.get_default_device().type
    default = len(device) * torch.finfo(torch.get_default_dtype()).bits
    y = x.tanh() * given * default
    y.scale = 3 + y.mean().item()  # type: ignore[attr-defined]
    return y


def remember(self: Any, x: Tensor) -> Tensor:
    y = x + self.last.mean(0)
    self.last = x.detach()
    return y


def embed_signs(self: Any, x: Tensor) -> Any:
    signs = (x > 0).long()
    return x * self.table(signs).mean(1)


# Functions that return several tensors, or take several.


def twice(_: Any, x: Tensor) -> Two:
    return x, x


def and_a_view(_: Any, x: Tensor) -> Two:
    return x, x.view_as(x)


def and_its_half(_: Any, x: Tensor) -> Two:
    return x, x[:, :2]


def and_its_input(_: Any, x: Tensor) -> Two:
    return x.tanh(), x


def and_integers(_: Any, x: Tensor) -> Two:
    return x, torch.arange(len(x), device=x.device)


def and_detached(_: Any, x: Tensor) -> Two:
    return 2 * x.detach(), x


def and_a_name(_: Any, x: Tensor) -> Pair:
    return Pair(x, 2 * x)


def added(_: Any, value: Any) -> Tensor:
    return merge(value, Tensor.add)


def swap(_: Any, value: Any) -> Any:
    """Exchange the first and the last tensor of a tuple if they have equal shapes and dtypes."""
    if not isinstance(value, tuple):
        return value
    first, last = value[0], value[-1]
    if first.shape != last.shape or first.dtype != last.dtype:
        return value
    return (last, *value[1:-1], first)


def by_name(_: Any, value: Any) -> Any:
    return (value.other, value.one) if isinstance(value, Pair) else value


# Functions that change something in place.


def add_in_place(_: Any, x: Tensor) -> Tensor:
    return x.add_(1)


def set_in_place(_: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0.5
    return x


def decay(self: Any, x: Tensor) -> Tensor:
    y = x * self.scale  # autograd saves `scale`
    with torch.no_grad():
        self.scale.mul_(0.9)
    return y


def and_its_buffer(self: Any, x: Tensor) -> Two:
    y = decay(self, x)
    return y, self.scale.expand(len(x), -1)


def added_in_place(_: Any, value: Any) -> Tensor:
    return merge(value, Tensor.add_)


# Layers with modules inside.


def normed(kind: Callable[..., nn.Module], **options: Any) -> Make:
    return lambda parts: norm(kind(2, **options))


def frozen_weight(_: Any) -> nn.Module:
    return tied(frozen_linear())


def on_linear(change: Callable[..., nn.Module], *args: Any) -> Make:
    """Return a function that makes a linear layer and applies `change` to it, e.g. weight norm."""
    return lambda parts: change(linear(), *args)


def table(**options: Any) -> nn.Module:
    return Do(embed_signs, table=nn.Embedding(2, WIDTH, **options))


def nested_relu() -> nn.Module:
    return nn.Sequential(nn.ReLU(True))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0, batch_first=True)


# When hypothesis shrinks a failing model, it prefers the kinds that come first here.
KINDS: dict[str, Make] = {
    "identity": own(nn.Identity),
    "linear": own(linear),
    "tanh": own(nn.Tanh),
    "relu": own(nn.ReLU),
    "view": own(Do, view),
    "strided": own(Do, strided),
    "squares": weighted(squares),
    "constant": weighted(constant),
    "frozen": own(frozen_linear),
    "frozen weight": frozen_weight,
    "detached": own(Do, detached),
    "half detached": own(Do, half_detached),
    "a new leaf": own(Do, new_leaf),
    "hooked": own(Do, hooked),
    "differentiated": weighted(differentiated),
    "vmap": weighted(mapped),
    "functional_call": lambda parts: Do(doubled, inner=linear()),
    "batch norm": normed(BatchNorm1d),
    "batch norm, momentum none": normed(BatchNorm1d, momentum=None),
    "batch norm, no statistics": normed(BatchNorm1d, track_running_stats=False),
    "batch norm, frozen": normed(Frozen),
    "instance norm": normed(InstanceNorm1d, affine=True, track_running_stats=True),
    "weight norm": on_linear(parametrizations.weight_norm),
    "spectral norm": on_linear(parametrizations.spectral_norm),
    "spectral norm, by a hook": on_linear(utils.spectral_norm),
    "pruned": on_linear(prune.random_unstructured, "weight", 0.5),
    "tied": lambda parts: tied(parts[0]),
    "shared": lambda parts: nn.Sequential(parts[0]),
    "shared norm": lambda parts: nn.Sequential(parts[1]),
    "borrowed": lambda parts: Do(borrowing, borrowed=[parts[0]]),
    "lstm": lambda parts: Do(one_step, lstm=nn.LSTM(WIDTH, WIDTH)),
    "transformer": own(encoder),
    "embedding": own(table, sparse=True),
    "embedding, rescaled": own(table, max_norm=0.5),
    "as weights": weighted(as_weights),
    "as things are": own(Do, as_things_are),
    "remember": lambda parts: Do(remember, last=torch.zeros(1, WIDTH)),
    "dropout": own(Draw),
    "dropout, own generator": own(draw_from),
    "dropout, checkpointed": own(Draw, use_reentrant=False),
    "checkpointed": own(checkpointed, False),
    "checkpointed, reentrant": own(checkpointed, True),
    "twice": own(Do, twice),
    "and a view": own(Do, and_a_view),
    "and its half": own(Do, and_its_half),
    "and its input": own(Do, and_its_input),
    "and integers": own(Do, and_integers),
    "and detached": own(Do, and_detached),
    "and a name": own(Do, and_a_name),
    "lstm cell": own(nn.LSTMCell, WIDTH, WIDTH),
    "sum": own(Do, added),
    "swap": own(Do, swap),
    "by name": own(Do, by_name),
    "relu in place": own(nn.ReLU, True),
    "nested relu in place": own(nested_relu),
    "add in place": own(Do, add_in_place),
    "set in place": own(Do, set_in_place),
    "dropout in place": own(Draw, inplace=True),
    "buffer in place": lambda parts: Do(decay, scale=torch.ones(WIDTH)),
    "parameter in place": lambda parts: Do(decay, scale=Parameter(torch.ones(WIDTH))),
    "and its buffer in place": lambda parts: Do(and_its_buffer, scale=torch.ones(WIDTH)),
    "sum in place": own(Do, added_in_place),
}
TO_SEVERAL = {kind for kind in KINDS if kind.startswith("and ")} | {"twice", "lstm cell"}
OF_SEVERAL = {"sum", "sum in place", "swap", "by name"}
