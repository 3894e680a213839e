"""Layers of generated models, `(N, WIDTH)` to `(N, WIDTH)`. Each does something that a pipeline could get wrong."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, utils
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from .draw import Draw, dropout
from .wiring import merge, with_skips

WIDTH = 4
Pair = namedtuple("Pair", "one other")


class Do(nn.Module):
    """A layer whose forward is `function(self, input)`. Tensors given by name become parameters or buffers."""

    def __init__(self, function: Callable[[Any, Any], Any], **holds: Any) -> None:
        super().__init__()
        self.function = function
        for name, x in holds.items():
            if isinstance(x, Tensor) and not isinstance(x, Parameter):
                self.register_buffer(name, x)
            else:
                setattr(self, name, x)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def layer(given: Any) -> nn.Module:
    """Return a module as it is; turn a function of tensors into a layer."""
    if isinstance(given, nn.Module):
        return given
    return Do(lambda _, value: given(*(value if isinstance(value, tuple) else (value,))))


def made(*layers: Callable[[], Any]) -> Callable[[], nn.Sequential]:
    """Return a function that builds a model. `layers` are factories of modules or functions."""
    return lambda: nn.Sequential(*(layer(make()) for make in layers))


class Frozen(nn.BatchNorm1d):
    """Batch norm that always stays in eval mode."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def five(last: Callable[[], nn.Module] | None = None) -> nn.Sequential:
    """Return the default model of rows: five layers."""
    return nn.Sequential(
        linear(), nn.Tanh(), linear(), nn.Sigmoid(), linear() if last is None else last()
    )


def real(*, grad: bool = True) -> Tensor:
    """Return the default input. Split into three micro-batches, the last one is smaller."""
    return torch.randn(8, WIDTH).requires_grad_(grad)


def weight() -> Parameter:
    return Parameter(torch.rand(WIDTH))


def acting(act: Callable[[Any], object]) -> nn.Module:
    """Return a layer that does something to itself, then multiplies by its weight."""
    return Do(lambda self, x: (act(self), x * self.weight)[1], weight=weight())


def norm(layer: nn.Module) -> nn.Module:
    """Apply a norm to two channels of two values each, so that a micro-batch may have one sample."""
    return nn.Sequential(nn.Unflatten(1, (2, 2)), layer, nn.Flatten())


def shared_parts() -> nn.ModuleList:
    """Return modules that several layers of a model may share."""
    return nn.ModuleList([linear(), norm(nn.BatchNorm1d(2))])


def freeze(build: Callable[[], nn.Sequential], *numbers: int) -> nn.Sequential:
    """Build layers, and freeze those with the given numbers."""
    layers = build()
    for number in numbers:
        layers[number].requires_grad_(False)
    return layers


def tied(to: nn.Linear) -> nn.Module:
    layer = linear()
    layer.weight = to.weight
    return layer


def draw_from(generator: torch.Generator | None = None) -> nn.Module:
    """Return a layer that draws from its own generator, or from the given one."""
    own = generator or torch.Generator().manual_seed(3)
    return Do(lambda self, x: x * dropout(x, self.generator), generator=own)


def table(**options: Any) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        return x * self.table((x > 0).long()).mean(1)

    return Do(run, table=nn.Embedding(2, WIDTH, **options))


def checkpointed(reentrant: bool) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        # A reentrant checkpoint warns if its input does not require grad.
        if reentrant and not x.requires_grad:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=reentrant)

    return Do(run, inner=nn.Sequential(linear(), nn.Tanh()))


def as_things_are(x: Tensor) -> Tensor:
    given = getattr(x, "scale", 2) * (3 if x.requires_grad else 4)
    default = len(torch.get_default_device().type) * torch.finfo(torch.get_default_dtype()).bits
    y = x.tanh() * given * default
    y.scale = 3 + y.mean().item()  # type: ignore[attr-defined]
    return y


def remember(self: Any, x: Tensor) -> Tensor:
    y = x + self.last.mean(0)
    self.last = x.detach()
    return y


def decay(self: Any, x: Tensor) -> Tensor:
    y = x * self.scale  # autograd saves `scale`
    with torch.no_grad():
        self.scale.mul_(0.9)
    return y


def set_in_place(_: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0.5
    return x


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
        return torch.autograd.grad((x.sin() * self.weight).sum(), x, create_graph=again)[0]


def doubled(self: Any, x: Tensor) -> Tensor:
    weights = {name: 2 * p for name, p in self.inner.named_parameters()}
    return torch.func.functional_call(self.inner, weights, (x,))


def swap(_: Any, value: Any) -> Any:
    alike = isinstance(value, tuple) and (value[0].shape, value[0].dtype) == (
        value[-1].shape,
        value[-1].dtype,
    )
    return (value[-1], *value[1:-1], value[0]) if alike else value


# Each builds a layer, given the `shared_parts()` of the model. Hypothesis shrinks towards the first ones.
KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "identity": lambda _: nn.Identity(),
    "linear": lambda _: linear(),
    "tanh": lambda _: nn.Tanh(),
    "relu": lambda _: nn.ReLU(),
    "view": lambda _: Do(lambda _, x: x.view_as(x)),
    "strided": lambda _: Do(lambda _, x: x.repeat_interleave(2, 1)[:, ::2]),
    "squares": lambda _: Do(lambda self, x: x * x * self.weight + x, weight=weight()),
    "constant": lambda _: Do(lambda self, x: self.weight.expand(len(x), -1), weight=weight()),
    "frozen": lambda _: linear().requires_grad_(False),
    "frozen weight": lambda _: tied(linear().requires_grad_(False)),
    "detached": lambda _: Do(lambda _, x: x.detach()),
    "half detached": lambda _: Do(lambda _, x: 0.5 * x + 0.5 * x.detach()),
    "a new leaf": lambda _: Do(lambda _, x: x.detach().requires_grad_(torch.is_grad_enabled())),
    "hooked": lambda _: Do(hooked),
    "differentiated": lambda _: Do(differentiated, weight=weight()),
    "vmap": lambda _: Do(
        lambda self, x: torch.vmap(lambda row: row.sin() * self.weight)(x), weight=weight()
    ),
    "functional_call": lambda _: Do(doubled, inner=linear()),
    "batch norm": lambda _: norm(nn.BatchNorm1d(2)),
    "batch norm, momentum none": lambda _: norm(nn.BatchNorm1d(2, momentum=None)),
    "batch norm, no statistics": lambda _: norm(nn.BatchNorm1d(2, track_running_stats=False)),
    "batch norm, frozen": lambda _: norm(Frozen(2)),
    "instance norm": lambda _: norm(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
    "weight norm": lambda _: parametrizations.weight_norm(linear()),
    "spectral norm": lambda _: parametrizations.spectral_norm(linear()),
    "spectral norm, by a hook": lambda _: utils.spectral_norm(linear()),
    "pruned": lambda _: prune.random_unstructured(linear(), "weight", 0.5),
    "tied": lambda parts: tied(parts[0]),
    "shared": lambda parts: nn.Sequential(parts[0]),
    "shared norm": lambda parts: nn.Sequential(parts[1]),
    "borrowed": lambda parts: Do(lambda self, x: x @ self.borrowed[0].weight, borrowed=[parts[0]]),
    "lstm": lambda _: Do(
        lambda self, x: self.lstm(x.unsqueeze(1))[0].squeeze(1), lstm=nn.LSTM(WIDTH, WIDTH)
    ),
    "transformer": lambda _: nn.TransformerEncoderLayer(
        WIDTH, 2, WIDTH, dropout=0, batch_first=True
    ),
    "embedding": lambda _: table(sparse=True),
    "embedding, rescaled": lambda _: table(max_norm=0.5),
    "as weights": lambda _: Do(
        lambda self, x: x * self.weight * (2 if self.weight.requires_grad else 3), weight=weight()
    ),
    "as things are": lambda _: Do(lambda _, x: as_things_are(x)),
    "remember": lambda _: Do(remember, last=torch.zeros(1, WIDTH)),
    "dropout": lambda _: Draw(),
    "dropout, own generator": lambda _: draw_from(),
    "dropout, checkpointed": lambda _: Draw(use_reentrant=False),
    "checkpointed": lambda _: checkpointed(False),
    "checkpointed, reentrant": lambda _: checkpointed(True),
    "twice": lambda _: Do(lambda _, x: (x, x)),
    "and a view": lambda _: Do(lambda _, x: (x, x.view_as(x))),
    "and its half": lambda _: Do(lambda _, x: (x, x[:, :2])),
    "and its input": lambda _: Do(lambda _, x: (x.tanh(), x)),
    "and integers": lambda _: Do(lambda _, x: (x, torch.arange(len(x), device=x.device))),
    "and detached": lambda _: Do(lambda _, x: (2 * x.detach(), x)),
    "and a name": lambda _: Do(lambda _, x: Pair(x, 2 * x)),
    "lstm cell": lambda _: nn.LSTMCell(WIDTH, WIDTH),
    "sum": lambda _: Do(lambda _, value: merge(value, Tensor.add)),
    "swap": lambda _: Do(swap),
    "by name": lambda _: Do(
        lambda _, value: (value.other, value.one) if isinstance(value, Pair) else value
    ),
    "relu in place": lambda _: nn.ReLU(True),
    "nested relu in place": lambda _: nn.Sequential(nn.ReLU(True)),
    "add in place": lambda _: Do(lambda _, x: x.add_(1)),
    "set in place": lambda _: Do(set_in_place),
    "dropout in place": lambda _: Draw(inplace=True),
    "buffer in place": lambda _: Do(decay, scale=torch.ones(WIDTH)),
    "parameter in place": lambda _: Do(decay, scale=Parameter(torch.ones(WIDTH))),
    "and its buffer in place": lambda _: Do(
        lambda self, x: (decay(self, x), self.scale.expand(len(x), -1)), scale=torch.ones(WIDTH)
    ),
    "sum in place": lambda _: Do(lambda _, value: merge(value, Tensor.add_)),
}
TO_SEVERAL = {kind for kind in KINDS if kind.startswith("and ")} | {"twice", "lstm cell"}
OF_SEVERAL = {"sum", "sum in place", "swap", "by name"}


def only_a_skip() -> nn.Sequential:
    """Return three layers. The only input of the third that requires grad is a skip."""
    constant = Do(lambda _, x: torch.ones_like(x, requires_grad=False))
    stashing = with_skips(constant, {"skip": lambda x, y: x.tanh()}, {})
    return nn.Sequential(linear(), stashing, with_skips(nn.Sigmoid(), {}, {"skip": torch.mul}))
