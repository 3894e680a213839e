"""What passes change, in place or not: buffers, parameters and inputs. And by the caller, of outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

from torchgpipe.task.guards import buffers

from ...library.traced import Squared
from ...plain import Plain
from ..compare import REORDERED
from ..parts.layers import KINDS, WIDTH, Do, linear, made, real
from ..row import Row, amid, steps

LARGE = buffers.SMALL // 4 + 1  # elements


class Holds(nn.Module):
    """Scale by buffers, and in training do something to them."""

    def __init__(self, change: Callable[[Any], object], size: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(size))
        self.register_buffer("nothing", None)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        buffers: Any = (self.buffer, self.nothing, self.inner._buffers.get("late"))
        y = x * sum(k + (5 if b is None else b[:1].clone()) for k, b in enumerate(buffers))
        if self.training:
            self.change(self)
        return y


def in_place(layer: Any) -> None:
    layer.buffer.add_(1)


def by_data(layer: Any) -> None:
    layer.buffer.data.add_(1)


def another(layer: Any) -> None:
    layer.buffer = layer.buffer + 1


def in_the_free_place(layer: Any) -> None:
    layer.nothing = torch.zeros(2) if layer.nothing is None else layer.nothing + 1


def once(layer: Any) -> None:
    """As a cache that grows; an attribute says whether it has to."""
    if "grown" not in vars(layer):
        layer.grown, layer.buffer = True, layer.buffer + 1


def two_of_one_memory() -> nn.Module:
    memory = torch.ones(WIDTH)
    return Do(
        lambda self, x: (self.one.data.add_(1), x * self.other.clone())[1],
        one=memory,
        other=memory.view(-1),
    )


class Kind(nn.Parameter):
    """A kind of parameter that a layer may look for."""


class Looks(nn.Module):
    """Use what is written on parameters, their kinds, and which of them are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.kind = nn.Parameter(torch.ones(WIDTH)), Kind(torch.ones(WIDTH))
        self.marked = linear().bias
        vars(self.marked)["decay"] = 0.1
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.tied = self.plain
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.kind) is Kind and type(self.plain) is nn.Parameter and self.absent is None
        assert self.tied is self.plain and self.plain.is_leaf and self.plain.requires_grad
        return (
            x * self.plain
            + self.kind * self.marked * vars(self.marked)["decay"]
            + self.tied * self.frozen
        )


def replaced(layer: Any) -> None:
    layer.inner.weight = nn.Parameter(torch.zeros(2, 2))


def holding(change: Callable[[Any], object], size: int = 2) -> Callable[[], nn.Sequential]:
    return made(linear, lambda: Holds(change, size), linear)


def adapts() -> nn.Module:
    """Return a layer that writes the statistics of a norm in evaluation mode."""
    norm = nn.BatchNorm1d(WIDTH, affine=False).eval()
    return Do(
        lambda self, x: (self.norm.running_mean.data.add_(x.detach().mean(0)), self.norm(x))[1],
        norm=norm,
    )


def counts() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    norm.register_buffer("seen", torch.ones(()))
    norm.register_forward_hook(lambda layer, args, y: y * layer.seen.add_(1).clone())
    return norm


def marked() -> nn.Module:
    layer = Do(lambda self, x: x * getattr(self.buffer, "scale", 1), buffer=torch.ones(WIDTH))
    vars(layer.buffer)["scale"] = 3.0
    return layer


def views_in_two() -> nn.Sequential:
    buffer = torch.ones(WIDTH)
    one, other = (
        Do(lambda self, x: x * self.buffer.add_(1).clone(), buffer=b)
        for b in (buffer, buffer.view(1, -1))
    )
    return nn.Sequential(linear(), one, other, linear())


def own_norm() -> nn.Module:
    """Return a norm that is none of PyTorch's, and reads its statistics."""
    return Do(
        lambda self, x: (
            F.batch_norm(x, self.mean, self.var, training=True) * (1 + self.mean * self.var)
        ),
        mean=torch.zeros(WIDTH),
        var=torch.ones(WIDTH),
    )


def norm_of_two(make: Callable[[], nn.Module] = own_norm) -> nn.Sequential:
    norm = make()
    return nn.Sequential(*(nn.Sequential(norm) if k % 3 == 0 else linear() for k in range(4)))


def sparse() -> nn.Module:
    return Do(
        lambda self, x: x + (self.adjacency @ x[:2]).sum(), adjacency=torch.eye(2).to_sparse()
    )


def weighted() -> nn.Module:
    """Change the input in place, by a parameter: the copy may require grad although the input does not."""
    return Do(lambda self, x: x.mul_(self.weight), weight=nn.Parameter(torch.ones(WIDTH)))


def add_one(x: Tensor) -> Tensor:
    """Work in place without an attribute `inplace`."""
    return x.add_(1)


def twice(kind: Any) -> Any:
    return made(linear, kind, linear, kind, linear)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def within() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Flatten(), relu()), linear())


def at_the_start(run: Any, x: Tensor) -> list[Tensor]:
    """Micro-batches are views of one tensor, and PyTorch refuses to change a view of a tensor that is split."""
    if isinstance(run, Plain):
        run[0] = nn.ReLU()
    run(x).square().sum().backward()
    return [x]


def changed_after(run: Any, x: Tensor) -> list[Tensor]:
    one, other = run(x)
    return [one.add_(1).detach(), other.mul_(2).detach()]


def changed_before_backward(run: Any, x: Tensor) -> None:
    """Sigmoid's backward needs its output. One micro-batch, since concatenation makes a copy."""
    y = run(x)
    y.mul_(2)
    y.sum().backward()


SAYS = r"partition 1 changed its input in place.*checkpoint='never'"
UNCOUNTED = "'buffer' of Holds in partition 0 was changed .*, which PyTorch does not count"
OTHER = "replaced, added, froze or hooked a parameter in its forward"
READS = "uses the running statistics of a batch norm"
OWN_GRAPHS = {"graph never": "", "": OTHER}


def checkpointed(message: str) -> dict[str, str]:
    return {"always": message, "except_last": message}


ROWS = [
    Row("a count in the passes", holding(in_place), balance=(2, 1), use=steps),
    *(
        Row(
            f"a count by `.data`, which PyTorch does not count, {size} elements",
            holding(by_data, size),
            balance=(2, 1),
            use=steps,
        )
        for size in (2, LARGE)
    ),
    *(
        Row(
            f"a count on a device to wait for, {size} elements",
            holding(by_data, size),
            balance=(2, 1),
            use=patch.object(buffers, "COMPARED", ["meta"])(steps),
            refused=refused,
        )
        for size, refused in ((2, {}), (LARGE, checkpointed(UNCOUNTED)))
    ),
    Row("statistics of an own norm", made(linear, own_norm, linear), balance=(2, 1), use=steps),
    *(
        Row(
            f"statistics of an own norm of two partitions, m={m}",
            norm_of_two,
            balance=(2, 2),
            use=steps,
            chunks=m,
            refused={by: "change the same buffer"},
        )
        for m, by in ((3, ""), (1, "ranks"))
    ),
    *(
        Row(what, made(linear, layer, linear), balance=(2, 1), use=use)
        for what, layer, use in (
            ("statistics of a norm in evaluation mode", adapts, steps),
            ("a norm with a buffer of its own", counts, steps),
            ("attributes of a buffer", marked, steps),
            (
                "the sign of a zero, which is equal to the other one",
                lambda: Do(
                    lambda self, x: (torch.copysign(x, self.buffer), self.buffer.data.neg_())[0],
                    buffer=torch.zeros(()),
                ),
                steps,
            ),
        )
    ),
    Row(
        "a buffer that grows once",
        holding(once),
        balance=(2, 1),
        use=steps,
        refused=checkpointed("is no buffer"),
    ),
    Row(
        "one memory in buffers of two partitions",
        views_in_two,
        balance=(2, 2),
        use=steps,
        refused={"": "change the same buffer"},
    ),
    Row(
        "an observer of quantization",
        made(linear, FusedMovingAvgObsFakeQuantize, linear),
        balance=(2, 1),
        use=steps,
        note="Quantization-aware training, as `prepare_qat` makes it.",
    ),
    Row("a sparse buffer", made(linear, sparse, linear), balance=(2, 1), use=steps),
    Row("another buffer in the passes", holding(another), balance=(2, 1), use=steps),
    Row("a buffer that comes in the passes", holding(in_the_free_place), balance=(2, 1), use=steps),
    Row(
        "a buffer that is registered in the passes",
        holding(
            lambda layer: layer.inner.register_buffer(
                "late", layer.inner._buffers.get("late", torch.zeros(2)) + 1
            )
        ),
        balance=(2, 1),
        use=steps,
    ),
    Row(
        "a buffer that comes after them",
        holding(id),
        balance=(2, 1),
        use=amid(lambda run, _: in_the_free_place(run[1])),
    ),
    Row(
        "a buffer removed",
        holding(id),
        balance=(2, 1),
        use=amid(lambda run, _: delattr(run[1], "buffer")),
    ),
    Row(
        "two that share memory", made(linear, two_of_one_memory, linear), balance=(2, 1), use=steps
    ),
    *(
        Row(
            f"statistics that another layer reads by {how}",
            made(
                linear,
                lambda read=read: Do(  # type: ignore[misc]
                    lambda self, x: self.norm(x) + read(self.norm), norm=nn.BatchNorm1d(WIDTH)
                ),
                linear,
            ),
            refused=checkpointed(READS),
            balance=(2, 1),
        )
        for how, read in (
            ("name", lambda norm: norm.running_mean),
            ("`buffers()`", lambda norm: next(norm.buffers())),
        )
    ),
    # One parameter by two names: its gradients are added up in another order.
    Row(
        "what a layer knows of its parameters",
        made(linear, Looks, linear),
        balance=(1, 2),
        use=steps,
        tolerance=REORDERED,
    ),
    Row("a parameter replaced in forward", holding(replaced), refused=OWN_GRAPHS, balance=(2, 1)),
    Row(
        "a parameter frozen in forward",
        holding(lambda layer: layer.inner.requires_grad_(False)),
        refused=OWN_GRAPHS,
        balance=(2, 1),
        without={"always": "autograd itself refuses it there, in the middle of backward"},
    ),
    Row(
        "a parameter without a shape",
        made(linear, partial(nn.LazyLinear, WIDTH), linear),
        refused={
            "graph never": "",
            "": r"LazyLinear has no shape for 'weight'.*run the layers once, then train",
        },
    ),
    Row(
        "a custom function at the end",
        made(linear, lambda: Squared.apply, linear),
        balance=(2, 1),
        use=steps,
    ),
    Row(
        "a copy of an input in place",
        made(lambda: lambda x: x + 1, relu, weighted, linear),
        partial(torch.ones, 8, WIDTH),
        (1, 2, 1),
    ),
    *(
        Row(f"{name} within a partition", twice(kind), balance=(2, 3), use=steps)
        for name, kind in (("relu", relu), ("add", lambda: add_one))
    ),
    # A layer that says so (`inplace`) gets a copy to work on, also behind what passes its input on.
    *(
        Row(f"{name} at a partition's start", twice(kind), balance=(1, 2, 2), use=steps)
        for name, kind in (("relu", relu), ("relu within others", within))
    ),
    Row(
        "add at a partition's start",
        twice(lambda: add_one),
        balance=(1, 2, 2),
        use=steps,
        refused=checkpointed(SAYS),
    ),
    *(
        Row(
            f"at the model's start, {balance}",
            made(relu, linear, nn.Tanh),
            lambda: real(grad=False),
            balance,
            use=at_the_start,
            without={"one micro-batch": "the input is changed, as without a pipeline"},
        )
        for balance in ((1, 2), (2, 1))
    ),
    # Also where there is one micro-batch, whose outputs are not concatenated.
    Row(
        "an output changed by the caller",
        made(nn.Identity, lambda: KINDS["twice"](None)),
        balance=(1, 1),
        chunks=1,
        use=changed_after,
        without={"graph": "autograd refuses it where one graph has all"},
    ),
    Row(
        "an output whose memory is used again",
        made(lambda: KINDS["and its buffer in place"](None), lambda: KINDS["sum"](None)),
        balance=(1, 1),
        use=lambda run, x: run(x),
        refused={"": "was changed in place before the partition took it"},
        without={"workers": "when they use it again is left to chance", "ranks": "likewise"},
    ),
    Row(
        "an output changed by the caller that backward needs",
        made(linear, nn.Sigmoid),
        balance=(1, 1),
        chunks=1,
        use=changed_before_backward,
        refused={
            "except_last": "modified by an inplace operation",
            "never": "modified by an inplace operation",
        },
        without={"always": "the output is a copy"},
    ),
]
