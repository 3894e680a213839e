"""Checks of failures: an exception in each place, and what comes after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.conformance_engines import Found, Make, Pipeline, squares
from benchmarks.conformance_parts import ON_PURPOSE, Checks, Raises, batch, mlp

CHECKS = Checks()
check = CHECKS.add

FAILURES = "an exception"
RAISES = "Every rank raises, the failing one the layer's own error; none hangs or is killed."


def heard(pipe: Pipeline) -> list[BaseException]:
    """Return what a step raises, with the errors that it says were the cause."""
    errors: list[BaseException] = []
    try:
        pipe.step(*batch(8))
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            errors.append(cause)
            cause = cause.__cause__
    return errors


def raised(pipe: Pipeline) -> Found:
    """Return whether a step raises on this rank, and whether it raises what the layer raised."""
    errors = heard(pipe)
    own = any(isinstance(error, ValueError) and str(error) == ON_PURPOSE for error in errors)
    return {"every rank raises": bool(errors), **({"the layer's own error": True} if own else {})}


@check(FAILURES, "in forward of the first partition", RAISES)
def _(make: Make) -> Found:
    return raised(make(nn.Sequential(Raises("forward"), *mlp()), [3, 2]))


@check(FAILURES, "in forward of the last partition", RAISES)
def _(make: Make) -> Found:
    return raised(make(mlp(Raises("forward")), [2, 3]))


@check(FAILURES, "in backward of the first partition", RAISES)
def _(make: Make) -> Found:
    return raised(make(mlp(Raises("backward")), [3, 2]))


@check(FAILURES, "in backward of the last partition", RAISES)
def _(make: Make) -> Found:
    return raised(make(mlp(Raises("backward")), [2, 3]))


@check(FAILURES, "in the criterion", RAISES)
def _(make: Make) -> Found:
    return raised(make(mlp(), [2, 2], criterion=once()))


@check(FAILURES, "is told to every rank", "Whichever log is read, it says what went wrong.")
def _(make: Make) -> Found:
    errors = heard(make(mlp(Raises("forward")), [2, 3]))
    return {"says what was raised": any(ON_PURPOSE in str(error) for error in errors)}


@check(FAILURES, "then the next mini-batch", "A program that leaves out a bad batch goes on with right gradients.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], criterion=once())
    heard(pipe)
    pipe.module.zero_grad()
    pipe.losses.clear()
    pipe.step(*batch(8, seed=1))
    return pipe


def once() -> Any:
    """Return a criterion that raises the first time."""
    raises = Raises("forward")

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        return squares(raises(output), target)

    return criterion
