"""Test cases about saved states, evaluation mode, and exceptions."""

from functools import partial

import torch
from torch import Tensor, nn

from ....parts import Fails
from ...pipe import Training, batch, mlp, squares
from .actions import (
    ON_PURPOSE,
    as_it_is,
    between_steps,
    evaluated,
    going_on,
    moved,
    next_batch,
    raised,
    stepped_then_evaluated,
    told,
    trained_then_evaluated,
)
from .models import adam, between, normed, sgd

STATE = "state files"
EVALUATION = "evaluation"
FAILURES = "an exception"
RAISES = (
    "If an error is raised there, every rank must raise an error. No rank may hang or be killed."
)


def raising_in(phase: str) -> nn.Sequential:
    """Build a model whose middle layer raises an error once, in forward or in backward."""
    fails = Fails()
    fails.fail(phase, ValueError(ON_PURPOSE))
    return mlp(fails)


def raising(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error. If the target is all zeros, raise an error."""
    if not target.any():
        raise ValueError(ON_PURPOSE)
    return squares(output, target)


def bad_target() -> tuple[Tensor, Tensor]:
    x, _ = batch()
    return x, torch.zeros(8, 3)


ROWS = [
    Training(
        "names and values",
        STATE,
        "All ranks together must save the same names and values as the model without a pipeline.",
        normed,
        (3, 2),
        action=as_it_is,
    ),
    Training(
        "another balance",
        STATE,
        "A training may continue with another balance or on other machines.",
        balance=(1, 3),
        action=moved,
        optimizer=sgd,
    ),
    Training(
        "going on",
        STATE,
        "A restarted training must continue as if it had not been interrupted, also with the "
        "same state of the optimizer.",
        action=going_on,
        optimizer=adam,
    ),
    Training(
        "outputs",
        EVALUATION,
        "The outputs must be those of the model in evaluation mode, without dropout.",
        between(nn.Dropout),
        (3, 2),
        action=evaluated(),
    ),
    Training(
        "batch norm",
        EVALUATION,
        "Evaluation must use the running statistics, and must not change them.",
        normed,
        (3, 2),
        action=stepped_then_evaluated,
    ),
    Training(
        "between two steps of training",
        EVALUATION,
        "An evaluation between two steps must not change the training.",
        action=between_steps,
        optimizer=adam,
    ),
    Training(
        "a larger batch than in training",
        EVALUATION,
        "Evaluation needs less memory than training, so its batches are often larger.",
        action=trained_then_evaluated,
        optimizer=sgd,
    ),
    Training(
        "an uneven batch",
        EVALUATION,
        "The last samples of a test set must count, even if they cannot be split into equal "
        "micro-batches.",
        action=evaluated(*batch(14)),
    ),
]
for phase in ("forward", "backward"):
    for place, balance in (("first", (3, 2)), ("last", (2, 3))):
        row = Training(
            f"in {phase} of the {place} partition",
            FAILURES,
            RAISES,
            partial(raising_in, phase),
            balance,
            action=raised,
        )
        ROWS.append(row)
ROWS += [
    Training(
        "in the criterion",
        FAILURES,
        RAISES,
        given=bad_target,
        action=raised,
        criterion=raising,
    ),
    Training(
        "is told to every rank",
        FAILURES,
        "If an error is raised on one rank, the errors on all other ranks must say what it was.",
        partial(raising_in, "forward"),
        (2, 3),
        action=told,
    ),
    Training(
        "then the next mini-batch",
        FAILURES,
        "If a program leaves out a bad mini-batch and continues, the next gradients must be right.",
        given=bad_target,
        action=next_batch,
        criterion=raising,
    ),
]
