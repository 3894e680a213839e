"""Test cases with context managers around forward, around backward, or around whole steps."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ...parts.layers import WIDTH, Do, linear, real
from ...row import Row, loss_of, step, steps
from .changes import layers
from .modes import within
from .reports import Report

by = contextvars.ContextVar("by", default=3.0)
BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
FP16 = partial(torch.autocast, "cpu", torch.float16)
ON_META = partial(torch.device, "meta")


class Loss(Tensor):
    """A loss that is a tensor subclass: in its `backward()`, `__torch_function__` is disabled."""


def scale_by_subclasses(_: Any, x: Tensor) -> Tensor:
    """Return `2 * x`, or `3 * x` while PyTorch has disabled `__torch_function__` of subclasses."""
    return x * (2 if torch._C._is_torch_function_enabled() else 3)


def loss_of_a_subclass(run: nn.Module, x: Tensor) -> None:
    loss_of(run, x).as_subclass(Loss).backward()


def times_variable(_: Any, x: Tensor) -> Tensor:
    return x * by.get()


def with_a_variable() -> nn.Sequential:
    return nn.Sequential(linear(), Do(times_variable), linear(), Do(times_variable))


def with_another_value(run: nn.Module, x: Tensor) -> None:
    token = by.set(2.0)
    loss = loss_of(run, x)
    by.reset(token)
    loss.backward()


def replaced_between_steps(run: Any, x: Tensor, replacement: Callable[[], nn.Module]) -> Any:
    before = steps(run, x)
    run[2].norm = replacement()
    return before, steps(run, x)


def reporting(*, training: bool = True) -> nn.Sequential:
    wide, norm, dropout = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.0)
    narrow = parametrizations.weight_norm(nn.Linear(8, WIDTH))
    layers = nn.Sequential(Report(), wide, norm, Report(), dropout, narrow, Report())
    return layers.train(training)


@contextmanager
def without_grad(and_then: Callable[[], Any]) -> Iterator[None]:
    with torch.no_grad(), and_then():
        yield


def after_inference(run: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        run.eval()(x)
    return step(run.train(), x)


# The contexts of forward and of backward. A recomputation runs in the modes of its forward.
PASSES: dict[str, tuple[Callable[[], Any], ...]] = {
    "no_grad": (torch.no_grad,),
    "inference_mode": (torch.inference_mode,),
    "enable_grad within no_grad": (partial(without_grad, torch.enable_grad),),
    "cached parametrizations": (partial(without_grad, parametrize.cached),),
    "autocast in forward": (BF16, nullcontext),
    "autocast in backward": (nullcontext, BF16),
    "autocast in both": (BF16, FP16),
    "default device in forward": (ON_META, nullcontext),
    "default device in backward": (nullcontext, ON_META),
}

ROWS = [
    Row(
        "a loss that is a tensor subclass",
        partial(layers, partial(Do, scale_by_subclasses)),
        balance=(2, 2),
        use=loss_of_a_subclass,
        note="The loss keeps its type, and its backward runs as without a pipeline.",
    ),
    Row("a context variable", with_a_variable, balance=(2, 2), use=with_another_value),
    Row(
        "BatchNorm1d for the inside of a layer",
        layers,
        use=partial(replaced_between_steps, replacement=partial(nn.BatchNorm1d, WIDTH)),
    ),
    Row(
        "Dropout for the inside of a layer",
        layers,
        use=partial(replaced_between_steps, replacement=partial(nn.Dropout, 0.0)),
    ),
    Row("a backward in inference mode", use=within(nullcontext, torch.inference_mode)),
]
for what, contexts in PASSES.items():
    use = within(*contexts)
    evaluating = partial(reporting, training=False)
    without_gradient = partial(real, grad=False)
    ROWS.append(Row(what, reporting, real, (3, 2, 2), use=use))
    ROWS.append(Row(f"{what} in evaluation", evaluating, without_gradient, (3, 2, 2), use=use))
ROWS.append(Row("training after inference", reporting, balance=(3, 2, 2), use=after_inference))
