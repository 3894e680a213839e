"""Functions that use a pipeline and return its results, for the test cases in this folder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from ...compare import REORDERED, differences
from ...pipe import Found, Pipe, batch

ON_PURPOSE = "on purpose"
differ: list[bool] = []
"""Whether the masks of two partitions differed, one for each micro-batch."""


def sequence(length: int) -> tuple[Tensor, Tensor]:
    x, target = batch(8 * length, seed=length)
    return x.view(8, length, 4), target.view(8, length, 3)


def seeded(count: int, **options: Any) -> list[Any]:
    """Return `count` different mini-batches."""
    return [batch(8, seed, **options) for seed in range(count)]


def picked(found: Found, names: list[str]) -> Found:
    return {name: found[name] for name in names}


# Steps.


def as_it_is(pipe: Pipe) -> Pipe:
    return pipe


def accumulated(pipe: Pipe) -> Pipe:
    second = batch(8, seed=1)
    return pipe.step().step(*second)


def trained(*batches: Any) -> Callable[[Pipe], Pipe]:
    """Return a function that trains a pipeline, with one step for each given mini-batch."""

    def action(pipe: Pipe) -> Pipe:
        for given in batches:
            pipe.train(*given)
        return pipe

    return action


def losses(pipe: Pipe) -> Found:
    trained(*seeded(3, targets=4))(pipe)
    found = pipe.found()
    return picked(found, [name for name in found if name.startswith("loss")])


def input_gradient(pipe: Pipe) -> Found:
    x, target = batch()
    x.requires_grad_()
    pipe.step(x, target)
    return {} if x.grad is None else {"the input's gradient": x.grad}


def in_turn(pipe: Pipe) -> Found:
    """Train two pipelines alternately."""
    pipes = [pipe, pipe.again()]
    for seed in range(2):
        for k, each in enumerate(pipes):
            each.train(*batch(8, seed + k))
    found = {}
    for k, each in enumerate(pipes):
        for name, x in each.found().items():
            found[f"{k}: {name}"] = x
    return found


def in_autocast(pipe: Pipe) -> Pipe:
    # If autocast caches the casts of weights, gradients are added up in bfloat16.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return pipe.step()


# Random numbers and batch norm.


def dropout_step(pipe: Pipe) -> Pipe:
    """Run a step with a fixed seed."""
    torch.manual_seed(7)
    return pipe.step()


def as_with(**changes: Any) -> Callable[[Pipe], Found]:
    """Return a function that checks that some settings do not change a pipeline's results.

    The function compares the losses and gradients of two pipelines. One has the settings of the
    test case. In the other, `changes` replace some of these settings.
    """

    def action(pipe: Pipe) -> Found:
        ours = dropout_step(pipe).found()
        changed = dropout_step(pipe.again(**changes)).found()
        common = sorted(ours.keys() & changed.keys())
        found = differences(picked(ours, common), picked(changed, common), 1e-4)
        return {"both are equal": not found}

    return action


def second_mask(x: Tensor, other: Tensor) -> Tensor:
    """Apply dropout in the second partition, and record whether the first one has another mask.

    Args:
        x: The tensor to which dropout is applied.
        other: The output of dropout in the first partition.
    """
    y = dropout(x)
    alike = y.ne(0).equal(other.ne(0))
    differ.append(not alike)
    return y + other


def masks(pipe: Pipe) -> Found:
    differ.clear()
    dropout_step(pipe)
    return {"masks of two partitions differ": all(differ)} if differ else {}


def of_the_mini_batch(pipe: Pipe) -> Found:
    """Run a step, and check that a batch norm has the running statistics of the whole mini-batch.

    The batch norm is the model's first layer.
    """
    found = pipe.step().found()
    norm = nn.BatchNorm1d(4)
    x, _ = pipe.row.given()
    norm(x)
    expected = {}
    for name, statistic in norm.named_buffers():
        expected[f"0.{name}"] = statistic
    names = sorted(expected.keys() & found.keys())
    if not names:
        return {}  # another rank has the first layer
    unlike = differences(picked(found, names), picked(expected, names), REORDERED)
    return {"statistics are those of the mini-batch": not unlike}


# State files.


def moved(pipe: Pipe) -> Pipe:
    """Train and save a pipeline. Load its state with another balance, and run a step."""
    pipe.train(*batch()).save()
    other = pipe.again(balance=(3, 1), optimizer=None)
    other.load()
    return other.step(*batch(8, seed=1))


def going_on(pipe: Pipe) -> Pipe:
    trained(*seeded(2))(pipe).save()
    other = pipe.again()
    other.load()
    return other.train(*batch(8, seed=2))


# Evaluation.


def evaluated(*given: Any) -> Callable[[Pipe], Pipe]:
    """Return a function that runs a pipeline's forward in eval mode.

    Args:
        given: The input and the target of a mini-batch. By default, the mini-batch of the test case
            is used.
    """
    return lambda pipe: pipe.evaluate(*given)


def evaluated_then_stepped(pipe: Pipe) -> Pipe:
    return pipe.evaluate().step()


def stepped_then_evaluated(pipe: Pipe) -> Pipe:
    return pipe.step().evaluate(*batch(8, seed=1))


def trained_then_evaluated(pipe: Pipe) -> Pipe:
    return pipe.train().evaluate(*batch(16))


def between_steps(pipe: Pipe) -> Pipe:
    for given in seeded(2):
        pipe.train(*given).evaluate(*batch(8, seed=5))
    return pipe


# Errors.


def heard(pipe: Pipe) -> list[BaseException]:
    """Run a step that fails. Return its error, followed by all errors in its chain of causes."""
    errors: list[BaseException] = []
    try:
        pipe.step()
    except Exception as error:
        errors.append(error)
        while (cause := errors[-1].__cause__) is not None:
            errors.append(cause)
    return errors


def raised(pipe: Pipe) -> Found:
    """Run a step in which a layer raises an error.

    Returns:
        A dictionary that says whether this rank raises an error, and whether this error has the
        layer's error as a cause.
    """
    errors = heard(pipe)
    found = {"every rank raises": bool(errors)}
    if any(isinstance(error, ValueError) and str(error) == ON_PURPOSE for error in errors):
        found["the layer's own error"] = True
    return found


def told(pipe: Pipe) -> Found:
    return {"says what was raised": any(ON_PURPOSE in str(error) for error in heard(pipe))}


def next_batch(pipe: Pipe) -> Pipe:
    """Run a step that raises an error, and then a normal step with another mini-batch."""
    heard(pipe)
    pipe.module.zero_grad()
    pipe.losses.clear()
    return pipe.step(*batch(8, seed=1))
