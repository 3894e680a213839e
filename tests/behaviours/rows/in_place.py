"""Changes in place: by layers, of their inputs and buffers; and by the caller, of outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...plain import Plain
from ..parts.layers import KINDS, linear, made, real
from ..row import Row, steps

SAYS = r"partition 1 changed its input in place.*checkpoint='never'"


def add_one(x: Tensor) -> Tensor:
    """Work in place, and not say so."""
    return x.add_(1)


def model(kind: Any) -> Any:
    return made(linear, kind, linear, kind, linear)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


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


ROWS = [
    *(Row(f"{name} within a partition", model(kind), balance=(2, 3), use=steps)
      for name, kind in (("relu", relu), ("add", lambda: add_one))),
    # A layer that says so (`inplace`) gets a copy to work on.
    Row("relu at a partition's start", model(relu), balance=(1, 2, 2), use=steps),
    Row("add at a partition's start", model(lambda: add_one), balance=(1, 2, 2), use=steps,
        refused={"always": SAYS, "except_last": SAYS}),
    *(Row(f"at the model's start, {balance}", made(relu, linear, nn.Tanh), lambda: real(grad=False), balance,
          use=at_the_start, without={"one micro-batch": "the input is changed, as without a pipeline"})
      for balance in ((1, 2), (2, 1))),
    # Also where there is one micro-batch, whose outputs are not concatenated.
    Row("an output changed by the caller", made(nn.Identity, lambda: KINDS["twice"](None)), balance=(1, 1), chunks=1,
        use=changed_after, without={"graph": "autograd refuses it where one graph has all"}),
    Row("an output whose memory is used again", made(lambda: KINDS["and its buffer in place"](None),
        lambda: KINDS["sum"](None)), balance=(1, 1), use=lambda run, x: run(x),
        refused={"": "was changed in place before the partition took it"},
        without={"workers": "when they use it again is left to chance", "ranks": "likewise"}),
    Row("an output changed by the caller that backward needs", made(linear, nn.Sigmoid), balance=(1, 1), chunks=1,
        use=changed_before_backward,
        refused={"except_last": "modified by an inplace operation", "never": "modified by an inplace operation"},
        without={"always": "the output is a copy"}),
]  # fmt: skip
