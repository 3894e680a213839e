"""The actions of the rows in rows/training.py: what they do with a pipeline, and which results they return."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .compare import REORDERED, differences
from .pipe import Found, Pipe, batch

ON_PURPOSE = "on purpose"
differ: list[bool] = []


def sequence(length: int) -> tuple[Tensor, Tensor]:
    x, target = batch(8 * length, seed=length)
    return x.view(8, length, 4), target.view(8, length, 3)


def trained(*batches: Any) -> Callable[[Pipe], Pipe]:
    """Return an action that trains with each mini-batch in turn."""

    def action(pipe: Pipe) -> Pipe:
        for given in batches:
            pipe.train(*given)
        return pipe

    return action


def seeded(count: int, **options: Any) -> list[Any]:
    return [batch(8, seed, **options) for seed in range(count)]


def input_gradient(pipe: Pipe) -> Found:
    x, target = batch()
    x.requires_grad_()
    pipe.step(x, target)
    return {"the input's gradient": x.grad} if x.grad is not None else {}


def dropout_step(pipe: Pipe) -> Pipe:
    """Run a step with the same seed on all ranks."""
    torch.manual_seed(7)
    return pipe.step()


def as_with(**changes: Any) -> Callable[[Pipe], Found]:
    """Return an action: check that a pipeline of the changed row has the same losses and gradients."""

    def action(pipe: Pipe) -> Found:
        a, b = dropout_step(pipe).found(), dropout_step(pipe.again(**changes)).found()
        return {
            "both are equal": not differences(
                {n: a[n] for n in a if n in b}, {n: b[n] for n in a if n in b}, 1e-4
            )
        }

    return action


def second_mask(x: Tensor, other: Tensor) -> Tensor:
    y = nn.functional.dropout(x)
    differ.append(not y.ne(0).equal(other.ne(0)))
    return y + other


def masks(pipe: Pipe) -> Found:
    differ.clear()
    dropout_step(pipe)
    return {"masks of two partitions differ": all(differ)} if differ else {}


def of_the_mini_batch(pipe: Pipe) -> Found:
    """Check that the first layer's running statistics are those of the whole mini-batch."""
    found, norm = pipe.step().found(), nn.BatchNorm1d(4)
    norm(pipe.row.given()[0])
    names = [f"0.{name}" for name, _ in norm.named_buffers() if f"0.{name}" in found]
    expected = {f"0.{name}": x for name, x in norm.named_buffers()}
    kept = not differences({n: found[n] for n in names}, {n: expected[n] for n in names}, REORDERED)
    return {"statistics are those of the mini-batch": kept} if names else {}


def losses(pipe: Pipe) -> Found:
    trained(*seeded(3, targets=4))(pipe)
    return {name: x for name, x in pipe.found().items() if name.startswith("loss")}


def in_turn(pipe: Pipe) -> Found:
    pipes = [pipe, pipe.again()]
    for seed in range(2):
        for k, each in enumerate(pipes):
            each.train(*batch(8, seed + k))
    return {f"{k}: {name}": x for k, each in enumerate(pipes) for name, x in each.found().items()}


def in_autocast(pipe: Pipe) -> Pipe:
    with torch.autocast(
        "cpu", torch.bfloat16, cache_enabled=False
    ):  # the cache would add up gradients in bfloat16
        return pipe.step()


def moved(pipe: Pipe) -> Pipe:
    pipe.train(*batch()).save()
    other = pipe.again(balance=(3, 1), optimizer=None)
    other.load()
    return other.step(*batch(8, seed=1))


def going_on(pipe: Pipe) -> Pipe:
    trained(*seeded(2))(pipe).save()
    other = pipe.again()
    other.load()
    return other.train(*batch(8, seed=2))


def between_steps(pipe: Pipe) -> Pipe:
    for given in seeded(2):
        pipe.train(*given).evaluate(*batch(8, seed=5))
    return pipe


def heard(pipe: Pipe) -> list[BaseException]:
    """Return the error that a step raises, followed by its chain of `__cause__`."""
    try:
        pipe.step()
    except Exception as error:
        errors: list[BaseException] = [error]
        while (cause := errors[-1].__cause__) is not None:
            errors.append(cause)
        return errors
    return []


def raised(pipe: Pipe) -> Found:
    """Check that a step raises on this rank, and whether the layer's own error is in the chain."""
    errors = heard(pipe)
    own = any(isinstance(error, ValueError) and str(error) == ON_PURPOSE for error in errors)
    return {"every rank raises": bool(errors), **({"the layer's own error": True} if own else {})}


def told(pipe: Pipe) -> Found:
    return {"says what was raised": any(ON_PURPOSE in str(error) for error in heard(pipe))}


def next_batch(pipe: Pipe) -> Pipe:
    heard(pipe)
    pipe.module.zero_grad()
    pipe.losses.clear()
    return pipe.step(*batch(8, seed=1))
