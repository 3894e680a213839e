"""Test cases with unusual backward passes.

For example, backward starts from one of two outputs, runs twice for the same graph, accumulates
gradients, or runs in another order than the forwards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad

from ...compare import REORDERED
from ...parts.layers import WIDTH, Do, five, linear
from ...row import Row, but_never, loss_of, step
from .layers import double_all

# Losses to run backward from. The two outputs have 4 and 3 features, and 8 samples in chunks of 3.


def the_one(a: Tensor, _: Tensor) -> Tensor:
    return a.square().sum()


def the_other(_: Tensor, b: Tensor) -> Tensor:
    return b.square().sum()


def last_sample(a: Tensor, _: Tensor) -> Tensor:
    return a[-1].sum()


def middle_micro_batch(_: Tensor, b: Tensor) -> Tensor:
    return b[3:6].exp().sum()


def different_samples(a: Tensor, b: Tensor) -> Tensor:
    return a[:2].sum() * b[5:].sum()


def indexed(a: Tensor, _: Tensor) -> Tensor:
    return a[[0, 5, 5]].square().sum()


def one_through_a_detour(a: Tensor, b: Tensor) -> Tensor:
    detour = b.detach().sum()
    return (a + detour).square().sum()


def changed_in_place(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1).mul_(2)
    return a.square().sum() + b.sin_().sum()


def hooked(a: Tensor, b: Tensor) -> Tensor:
    a.register_hook(lambda grad: grad * 3)
    return a.square().sum() + b.sum()


PARTS = {
    "the one": the_one,
    "the other": the_other,
    "last sample": last_sample,
    "middle micro-batch": middle_micro_batch,
    "different samples": different_samples,
    "indexed": indexed,
    "one through a detour": one_through_a_detour,
    "changed in place": changed_in_place,
    "hooked": hooked,
}


def both(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.one(x), self.other(x)


def two_outputs() -> nn.Module:
    """Return a layer with two outputs. Each output is computed by a linear layer of its own."""
    return Do(both, one=linear(), other=nn.Linear(WIDTH, 3))


def from_part(part: Callable[[Tensor, Tensor], Tensor], run: nn.Module, x: Tensor) -> Any:
    return step(run, x, lambda outputs: part(*outputs))


# Uses of a model and its input.


def thawed_between_steps(run: nn.Module, _: Tensor) -> list[Any]:
    found: list[Any] = []
    for frozen in (True, False, True):
        run.zero_grad()
        next(run.parameters()).requires_grad_(not frozen)
        loss_of(run).backward()
        found += [None if p.grad is None else p.grad.clone() for p in run.parameters()]
    return found


def given_gradients(run: nn.Module, x: Tensor) -> None:
    run(x).backward(torch.tensor(2.0).expand(8, WIDTH))


def hooked_layers(run: Any, x: Tensor) -> None:
    run[2].register_full_backward_hook(double_all)
    run[3].register_forward_hook(lambda layer, args, y: y * 3)
    loss_of(run, x).backward()


def gradients_that_are_views(run: nn.Module, x: Tensor) -> list[bool]:
    """Set each `.grad` to a view of one large tensor, as some optimizers do, and run two steps.

    Return for each parameter whether its `.grad` is still this view.
    """
    parameters = [*run.parameters()]
    memory = torch.zeros(len(parameters), WIDTH * WIDTH)
    views = []
    for p, row in zip(parameters, memory, strict=True):
        view = row[: p.numel()].view_as(p)
        p.grad = view
        views.append(view)
    for _ in range(2):
        loss_of(run, x).backward()
    kept = []
    for p, view in zip(parameters, views, strict=True):
        kept.append(bool(view.any()) and p.grad is view)
    return kept


def grad_twice(run: nn.Module, x: Tensor) -> list[Any]:
    loss = loss_of(run, x)
    wanted = [x, *run.parameters()]
    return [grad(loss, wanted, retain_graph=True), grad(loss, wanted, retain_graph=False)]


def grad_then_backward(run: nn.Module, x: Tensor) -> Any:
    loss = loss_of(run, x)
    found = grad(loss, x, retain_graph=True)
    loss.backward()
    return found


def grad_of_one(run: nn.Module, x: Tensor) -> Any:
    parameters = [*run.parameters()]
    return grad(loss_of(run, x), parameters[1])


def backward_of_one(run: nn.Module, x: Tensor) -> None:
    parameters = [*run.parameters()]
    loss_of(run, x).backward(inputs=[parameters[2]])


def retained(run: nn.Module, x: Tensor) -> None:
    loss = loss_of(run, x)
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)


def several_mini_batches(run: nn.Module, x: Tensor) -> None:
    loss = loss_of(run, x) + loss_of(run)
    loss.backward()


def two_forwards(run: nn.Module, x: Tensor) -> None:
    losses = [loss_of(run, x), loss_of(run)]
    for loss in losses:
        loss.backward()


def two_forwards_last_first(run: nn.Module, x: Tensor) -> None:
    losses = [loss_of(run, x), loss_of(run)]
    for loss in reversed(losses):
        loss.backward()


def one_after_itself(run: nn.Module, x: Tensor) -> None:
    loss_of(run, run(x)).backward()


def twice_without_retain_graph(run: nn.Module, x: Tensor) -> None:
    """Run backward twice without `retain_graph`, so that the pipeline must raise an error.

    PyTorch itself does not raise: the backward of a sum needs no saved tensors.
    """
    loss = run(x).sum()
    loss.backward()
    run.zero_grad()
    loss.backward()


def to_be_differentiated(run: nn.Module, x: Tensor) -> None:
    """Run a backward with `create_graph=True`, for which the pipeline must raise an error.

    After the error, no parameter may have a gradient, and a backward without this option must work.
    """
    loss = loss_of(run, x)
    try:
        loss.backward(create_graph=True)
    finally:
        assert all(p.grad is None for p in run.parameters())
        loss.backward()
        assert all(p.grad is not None for p in run.parameters())
        run.zero_grad()


Use = Callable[[Any, Tensor], Any]

# Gradients are equal to the bit.
USES: dict[str, Use] = {
    "thawed between steps": thawed_between_steps,
    "gradients given by the caller": given_gradients,
    "hooks of layers": hooked_layers,
    "gradients stay where they are": gradients_that_are_views,
    "grad twice": grad_twice,
    "grad of the input, then backward": grad_then_backward,
}
OF_ONE: dict[str, Use] = {
    "`torch.autograd.grad`": grad_of_one,
    "`backward(inputs=…)`": backward_of_one,
}
# Here gradients are equal only up to rounding, as they are added up in another order. Without a
# pipeline, autograd adds up the gradients of all mini-batches, and then adds the sum to `.grad`. A
# pipeline adds the sum of each mini-batch, in each backward, separately.
SUMS: dict[str, Use] = {
    "retain_graph, twice": retained,
    "several mini-batches before a backward": several_mini_batches,
    "two forwards, then two backwards": two_forwards,
    "two forwards, then two backwards, the last first": two_forwards_last_first,
    "one after itself": one_after_itself,
}
RETAIN = {"": "retain_graph=True"}

ROWS: list[Row] = []
for what, part in PARTS.items():
    ROWS.append(Row(f"from {what}", partial(five, two_outputs), use=partial(from_part, part)))
ROWS += [Row(what, use=use) for what, use in USES.items()]
for what, use in OF_ONE.items():
    ROWS.append(
        Row(what, use=use, note="The gradient may be that of the input or of any parameter.")
    )
ROWS += [Row(what, use=use, tolerance=REORDERED) for what, use in SUMS.items()]
ROWS += [
    Row("twice without retain_graph", use=twice_without_retain_graph, refused=RETAIN),
    Row(
        "twice without retain_graph, one micro-batch",
        use=twice_without_retain_graph,
        refused=RETAIN,
        chunks=1,
    ),
    Row(
        "a backward to be differentiated",
        use=to_be_differentiated,
        refused=but_never("create_graph=True"),
        without={"never": "it can be"},
    ),
]
